/* own_answers.h: replaces the answers that libmicrohttpd gives by itself.
 *
 * libmicrohttpd refuses a malformed message by itself, for example a request line with a space in its target, a header
 * without a colon, a malformed Content-Length or chunk, or a head that is too long. libmicrohttpd's answer is an HTML
 * page that differs from version to version: 1.0.1 redirects to a target without the space, 0.9.75 sends the head of
 * some answers twice. attnd sends none of these pages. This program defines the functions with which libmicrohttpd
 * sends bytes, as it defines epoll_wait() (mhd_quirks.c). These functions send a problem document instead, and then the
 * connection ends.
 *
 * An answer is libmicrohttpd's own if it is an error and attnd has answered no request on its connection. attnd decides
 * this by the bytes that are about to be sent, not by libmicrohttpd's log messages, and does so for TLS too. */
#ifndef OWN_ANSWERS_H
#define OWN_ANSWERS_H

struct connection;
struct http_thread;
struct request;

/* Call this on an HTTP thread before it serves its first connection. */
void own_answers_begin(struct http_thread *thread);
/* Answers a request that has failed in the middle of its body, where libmicrohttpd takes no answer. The caller must end
 * the connection after it. */
void own_answers_refuse(struct request *request);
/* Call this when libmicrohttpd ends a connection whose socket is still open. If the client has sent a part of a message
 * that was not answered, this function answers that the message is malformed. libmicrohttpd 0.9.75 ends a connection in
 * this way at the second fault in a head. */
void own_answers_end(struct connection *connection);

#endif
