/* mailbox.c: messages from any thread to the event loop of the main thread, each delivered once, in the order of
 * posting.
 *
 * uv_async_send() merges wake-ups, so each run of the callback takes the whole list of messages. It handles them
 * without the lock, because a handler may be slow or may post messages. A post wakes the loop only if the list was
 * empty. */
#include "server/base/mailbox.h"

#include <assert.h>

static void on_wake(uv_async_t *async)
{
    struct mailbox *box = async->data;
    pthread_mutex_lock(&box->lock);
    struct message *message = box->first;
    box->first = NULL;
    box->last = &box->first;
    pthread_mutex_unlock(&box->lock);
    while (message) {
        /* `next` is read before the call, because the handler may free the message */
        struct message *next = message->next;
        message->next = NULL;
        box->handler(box->context, message);
        message = next;
    }
}

int mailbox_open(struct mailbox *box, uv_loop_t *loop, mailbox_handler handler, void *context)
{
    pthread_mutex_init(&box->lock, NULL);
    box->first = NULL;
    box->last = &box->first;
    box->handler = handler;
    box->context = context;
    const int error = uv_async_init(loop, &box->async, on_wake);
    box->async.data = box;
    return error;
}

void mailbox_close(struct mailbox *box)
{
    uv_close((uv_handle_t *)&box->async, NULL);
    pthread_mutex_destroy(&box->lock);
}

void mailbox_post(struct mailbox *box, struct message *message)
{
    message->next = NULL;
    pthread_mutex_lock(&box->lock);
    assert(box->last != &message->next); /* the message must not be in the list already */
    const int wake = box->first == NULL;
    *box->last = message;
    box->last = &message->next;
    pthread_mutex_unlock(&box->lock);
    if (wake) uv_async_send(&box->async);
}
