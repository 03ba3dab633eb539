/* own_answers.h: replaces the answers that libmicrohttpd gives by itself.
 *
 * libmicrohttpd refuses a malformed message without asking: a request line with a space in its target, a header without
 * a colon, a malformed Content-Length or chunk, a head that is too long. Its answer is a page in HTML, and differs from
 * version to version: 1.0.1 redirects to a target without the space, 0.9.75 sends the head of some answers twice. None
 * of these pages is sent. The functions with which libmicrohttpd sends are the program's own, as epoll_wait() is
 * (mhd_quirks.c). They send the problem document instead, and then the connection ends.
 *
 * An answer is libmicrohttpd's own if it is an error and we have answered no request on its connection. This is decided
 * by what is about to be sent, not by libmicrohttpd's log messages, and holds for TLS too. */
#ifndef OWN_ANSWERS_H
#define OWN_ANSWERS_H

struct connection;
struct http_thread;
struct request;

/* Call this on a thread before it serves its first connection. */
void own_answers_begin(struct http_thread *thread);
/* Answers a request that has failed in the middle of its body, where libmicrohttpd takes no answer. The connection is
 * to be ended. */
void own_answers_refuse(struct request *request);
/* Call this when libmicrohttpd ends a connection whose socket is still open. In the middle of a message that has no
 * answer, with the client still there, it tells the client that the message is malformed. 0.9.75 ends a connection so
 * at the second fault in a head. */
void own_answers_end(struct connection *connection);

#endif
