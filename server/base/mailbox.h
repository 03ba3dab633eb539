/* mailbox.h: the only way from any thread to the event loop of the main thread: a locked list of messages and a
 * uv_async_t.
 *
 *   struct mailbox box;
 *   mailbox_open(&box, loop, on_message, context);   // loop thread
 *   mailbox_post(&box, &thing->message);             // any thread; the message belongs to the loop from here on
 *
 * Posting hands over the ownership of a message: everything written before it is visible in on_message(). */
#ifndef MAILBOX_H
#define MAILBOX_H

#include <pthread.h>
#include <uv.h>

/* A message, to be embedded in the struct that is sent. A message may be in only one mailbox at a time. */
struct message {
    struct message *next;
    int kind;
};

typedef void (*mailbox_handler)(void *context, struct message *message);

struct mailbox {
    pthread_mutex_t lock;
    struct message *first, **last;
    uv_async_t async;
    mailbox_handler handler;
    void *context;
};

/* Opens the mailbox. `handler` will be called on the thread of `loop` for each message. Returns 0, or an error code of
 * libuv (UV_...). */
int mailbox_open(struct mailbox *box, uv_loop_t *loop, mailbox_handler handler, void *context);
/* Closes the mailbox. Call this on the main thread. The libuv handle is closed in the next iteration of the event
 * loop. */
void mailbox_close(struct mailbox *box);
void mailbox_post(struct mailbox *box, struct message *message);

#endif
