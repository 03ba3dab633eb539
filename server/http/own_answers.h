/* own_answers.h: replaces the error pages that libmicrohttpd sends without calling attnd.
 *
 * libmicrohttpd refuses a malformed request before attnd gets it. Examples are a space in the target of the request
 * line, a header without a colon, a malformed Content-Length or chunk, and headers that are too long. libmicrohttpd's
 * answer is an HTML page, which differs between versions. Version 1.0.1 answers a target with a space by a redirect to
 * the target without the space. Version 0.9.75 sends the head of some answers twice.
 *
 * attnd sends none of these pages. own_answers.c defines the functions with which libmicrohttpd sends bytes, so
 * libmicrohttpd calls these functions and not the system's. (mhd_quirks.c replaces epoll_wait() in the same way.) In
 * place of an error page, the functions send a problem document (an error as JSON), and then the connection ends.
 *
 * The functions recognize an error page of libmicrohttpd by two facts: the bytes to send are an answer with an error
 * status, and attnd has answered no request on this connection. They look only at the bytes, not at libmicrohttpd's log
 * messages. This also works for TLS. */
#ifndef OWN_ANSWERS_H
#define OWN_ANSWERS_H

struct connection;
struct http_thread;
struct request;

/* Call this on an HTTP thread before it serves its first connection. */
void own_answers_begin(struct http_thread *thread);
/* Answers a request that has failed in the middle of its body, when libmicrohttpd accepts no answer. The caller must
 * then end the connection. */
void own_answers_refuse(struct request *request);
/* Call this when libmicrohttpd ends a connection whose socket is still open. If the client has sent a part of a message
 * that was not answered, this function answers that the message is malformed. libmicrohttpd 0.9.75 ends a connection in
 * this way at the second fault in a head. */
void own_answers_end(struct connection *connection);

#endif
