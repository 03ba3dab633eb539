/* config_suggestions.h: option names that other servers use, and environment variables that begin with ATTND_ but are
 * no options of attnd. */
#ifndef CONFIG_SUGGESTIONS_H
#define CONFIG_SUGGESTIONS_H

#include <stdbool.h>

/* Names that other servers give to an option, such as "port p" (two names), and attnd's option with the same
 * meaning. */
struct config_suggestion {
    const char *names;
    const char *flag, *value;
    /* advice for users of these names, if attnd has no such option; NULL: attnd has an option with the same meaning */
    const char *instead;
};
extern const struct config_suggestion config_suggestions[]; /* in the last row `names` is NULL */

/* Returns the row whose names include `name`, or NULL. Upper and lower case are equal, and so are '_' and '-'. */
const struct config_suggestion *config_suggestion(const char *name);

/* True if Kubernetes or a Docker link set the variable for a service called attnd; it is then no option. Examples:
 * ATTND_SERVICE_HOST, ATTND_PORT=tcp://10.0.0.1:8080, ATTND_NAME=/client/attnd. */
bool config_is_service_link(const char *name, const char *value);

/* True if the variable belongs to this project's Makefile, tests, examples or deploy/compose.yaml, so that the server
 * ignores it. */
bool config_is_of_the_project(const char *name);

#endif
