/* own_answers.h: what libmicrohttpd answers by itself is answered by us.
 *
 * A message that is none (a request line with a space in its target, a header without a colon, a malformed
 * Content-Length or chunk, a head that is too long) libmicrohttpd refuses without asking. Its answer is a page in HTML,
 * which is another one in each version: 1.0.1 redirects to a target without the space, 0.9.75 sends the head of some
 * answers twice. None of these pages leaves: the functions with which libmicrohttpd sends are the program's own, as
 * epoll_wait() is (http_threads.c), and send the problem document instead, after which the connection ends.
 *
 * An answer is libmicrohttpd's own if it is an error and there is no request on its connection that we have answered.
 * This is seen at the socket, and on no words of a log; TLS is no exception. */
#ifndef OWN_ANSWERS_H
#define OWN_ANSWERS_H

struct connection;
struct http_thread;
struct request;

/* Which thread this is, before it serves its first connection. */
void own_answers_begin(struct http_thread *thread);
/* Answers a request that has failed in the middle of its body, where libmicrohttpd takes no answer. The connection is
 * to be ended. */
void own_answers_refuse(struct request *request);
/* libmicrohttpd ends the connection, whose socket is still open. If it does so in the middle of a message, with the
 * client still there and no answer given (0.9.75 does with a second fault in a head), the client is told that the
 * message is malformed. */
void own_answers_end(struct connection *connection);

#endif
