/* test_mailbox.c: tests that the mailbox delivers every message once and in order. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "server/base/mailbox.h"

enum { SENDERS = 4, EACH = 20000 };

struct note {
    struct message message;
    int sender, number;
};

struct reader {
    uv_loop_t loop;
    struct mailbox box;
    int received, next[SENDERS];
    int extra; /* number of messages that the handler itself must post */
};

static void on_note(void *context, struct message *message)
{
    struct reader *reader = context;
    struct note *note = (struct note *)message;
    assert_null(message->next);
    assert_int_equal(note->number, reader->next[note->sender]);
    reader->next[note->sender]++;
    reader->received++;
    if (reader->extra > 0) { /* a message that the handler posts is delivered in a later wake-up */
        reader->extra--;
        note->number++;
        mailbox_post(&reader->box, message);
        return;
    }
    free(note);
    if (reader->received == SENDERS * EACH) mailbox_close(&reader->box);
}

struct sender {
    struct mailbox *box;
    int index;
};

static void *send_notes(void *context)
{
    const struct sender *sender = context;
    for (int i = 0; i < EACH; i++) {
        struct note *note = calloc(1, sizeof *note);
        note->sender = sender->index;
        note->number = i;
        mailbox_post(sender->box, &note->message);
    }
    return NULL;
}

static void test_messages_of_many_threads_arrive_once_and_in_order(void **state)
{
    (void)state;
    struct reader reader = { 0 };
    struct sender senders[SENDERS];
    pthread_t threads[SENDERS];
    assert_int_equal(uv_loop_init(&reader.loop), 0);
    assert_int_equal(mailbox_open(&reader.box, &reader.loop, on_note, &reader), 0);
    for (int i = 0; i < SENDERS; i++) {
        senders[i] = (struct sender){ &reader.box, i };
        pthread_create(&threads[i], NULL, send_notes, &senders[i]);
    }
    uv_run(&reader.loop, UV_RUN_DEFAULT);
    for (int i = 0; i < SENDERS; i++) pthread_join(threads[i], NULL);
    assert_int_equal(reader.received, SENDERS * EACH);
    assert_int_equal(uv_loop_close(&reader.loop), 0);
}

static void test_a_handler_may_post_the_message_it_was_given(void **state)
{
    (void)state;
    struct reader reader = { .extra = 10 };
    struct note *note = calloc(1, sizeof *note);
    assert_int_equal(uv_loop_init(&reader.loop), 0);
    assert_int_equal(mailbox_open(&reader.box, &reader.loop, on_note, &reader), 0);
    mailbox_post(&reader.box, &note->message);
    while (reader.received < 11) uv_run(&reader.loop, UV_RUN_ONCE);
    mailbox_close(&reader.box);
    uv_run(&reader.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&reader.loop), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_of_many_threads_arrive_once_and_in_order),
        cmocka_unit_test(test_a_handler_may_post_the_message_it_was_given),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
