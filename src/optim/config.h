/* Configurations: ranges, which options may change between steps, and the defaults that all optimizers have. All
 * options stand in one table. */
#ifndef TCHI_OPTIM_CONFIG_H
#define TCHI_OPTIM_CONFIG_H

#include <torchium/optim.h>

/* What every configuration begins with, before an optimizer sets its own. */
tch_optim_config tchi_config_defaults(void);

/* Fills in what `next` leaves open: scalar_lr, for methods that give AdamW a share of lr, and the lr that it goes with,
 * that of the configuration which brings scalar_lr. `now` is what the group has; NULL where it is being made. */
void tchi_config_fix_ratio(tch_optim_config *next, const tch_optim_config *now);

/* Of AdamW's part: its learning rate over lr, 0 where no ratio is kept; and the learning rate itself. */
double tchi_config_scalar_ratio(const tch_optim_config *config);
double tchi_config_scalar_lr(const tch_optim_config *config);

/* Every option within its range; the message names the one that is not, with its value. */
tch_status tchi_config_check(const char *function, const tch_optim_config *config);

/* `next` differs from `now` only in options that may change between steps. */
tch_status tchi_config_check_change(const tch_optim_config *now, const tch_optim_config *next);

/* For the checks of an optimizer: the message for a value that is out of range; a beta2 below 1; and an option that was
 * 0 when the optimizer was made, and for which it therefore has no memory. */
tch_status tchi_config_refuse(const char *function, const char *name, double value, const char *range);
tch_status tchi_config_check_beta2(const char *function, const tch_optim_config *config);
tch_status tchi_config_check_kept(const char *name, double now, double next);

/* The options one by one, for checkpoints: name and value of option `index` as a number; 0 past the end. Those that may
 * change between steps are marked. */
int tchi_config_option(int32_t index, const char **name, int *changes);
/* A number from elsewhere, called `what` in messages, that is to become option `index`: NaN and what is too large, or
 * no whole number, cannot be set. */
tch_status tchi_config_check_value(const char *what, int32_t index, double value);
double tchi_config_get(const tch_optim_config *config, int32_t index);
void tchi_config_set(tch_optim_config *config, int32_t index, double value);

#endif
