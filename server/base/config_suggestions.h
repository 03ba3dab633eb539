/* config_suggestions.h: names of options that other servers use, and foreign environment variables
 * that begin with ATTND_. */
#ifndef CONFIG_SUGGESTIONS_H
#define CONFIG_SUGGESTIONS_H

#include <stdbool.h>

/* One row of hints: the names that other servers give to an option, and the option of attnd that replaces it. */
struct config_suggestion {
    const char *names; /* other servers' names, without dashes, separated by spaces: "port p" */
    const char *flag, *value;
    const char *instead; /* what to do if attnd has no option for it; NULL otherwise */
};
extern const struct config_suggestion config_suggestions[]; /* the last row has names NULL */

/* Returns the row that has this name, or NULL. The case is ignored, and '_' is equal to '-'. */
const struct config_suggestion *config_suggestion(const char *name);

/* True if the variable was set by Kubernetes or by a Docker link, and therefore is no option. Both describe every
 * service called attnd or attnd-...: ATTND_SERVICE_HOST, ATTND_PORT=tcp://10.0.0.1:8080, ATTND_PORT_8080_TCP_ADDR.
 * Docker adds ATTND_NAME=/client/attnd and the other container's environment as ATTND_ENV_PATH and the like. */
bool config_is_service_link(const char *name, const char *value);

/* True if the variable belongs to this project's Makefile, tests, examples or deploy/compose.yaml. These variables are
 * no options, and the server starts when a shell has one of them set. */
bool config_is_of_the_project(const char *name);

#endif
