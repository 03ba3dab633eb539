/* config_habits.h: how other servers call their options, and the variables that others put into the environment. */
#ifndef CONFIG_HABITS_H
#define CONFIG_HABITS_H

#include <stdbool.h>

/* Options of other servers: which one of ours does it, and with what value ("": none is meant). */
struct config_habit {
    const char *names; /* without dashes, with spaces between them: "port p" */
    const char *flag, *value;
    const char *instead; /* where none of ours does it: what to do; NULL otherwise */
};
extern const struct config_habit config_habits[]; /* names is NULL after the last */

/* NULL: nobody's. The name is compared in any case, '_' as '-'. */
const struct config_habit *config_habit(const char *name);

/* Kubernetes, and links of Docker, describe every service that is called attnd or attnd-... by variables:
 * ATTND_SERVICE_HOST, ATTND_PORT=tcp://10.0.0.1:8080, ATTND_PORT_8080_TCP_ADDR; Docker adds ATTND_NAME=/client/attnd
 * and the environment of the other container, ATTND_ENV_PATH. Such a variable is not meant for us. */
bool config_is_service_link(const char *name, const char *value);

/* Variables of this project that are no options: those of its Makefile and tests, and of deploy/compose.yaml. A shell
 * that has one of them set starts a server all the same. */
bool config_is_of_the_project(const char *name);

#endif
