/* own_answers.h: replaces the error pages that libmicrohttpd sends without calling attnd.
 *
 * libmicrohttpd refuses malformed requests itself: a space in the target, a header without a colon, a malformed
 * Content-Length or chunk, or headers that are too long. Its HTML pages differ between versions, and 0.9.75 sends the
 * head of some answers twice.
 *
 * own_answers.c defines the functions with which libmicrohttpd sends bytes, so libmicrohttpd calls these instead of the
 * libraries' functions. In place of an error page they send a problem document (an error as JSON), and the connection
 * ends. They recognize an error page by two facts: the bytes are an answer with an error status, and attnd has answered
 * no request on this connection. This also works for TLS. */
#ifndef OWN_ANSWERS_H
#define OWN_ANSWERS_H

struct connection;
struct http_thread;
struct request;

/* Tells own_answers.c that the calling thread is this HTTP thread. Call this before the thread serves its first
 * connection. */
void own_answers_begin(struct http_thread *thread);
/* Answers a request that has failed in the middle of its body, when libmicrohttpd accepts no answer. The caller must
 * then end the connection. */
void own_answers_refuse(struct request *request);
/* Call this when libmicrohttpd ends a connection whose socket is still open. If the client has sent a part of a message
 * that was not answered, this function answers that the message is malformed. */
void own_answers_end(struct connection *connection);

#endif
