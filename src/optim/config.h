/* Configurations: ranges, which options may change between steps, and common defaults. All options are in one table. */
#ifndef TCHI_OPTIM_CONFIG_H
#define TCHI_OPTIM_CONFIG_H

#include <torchium/optim.h>

#include "core/saved.h"

extern const tchi_options tchi_optim_options;

/* The common defaults, before an optimizer sets its own. */
tch_optim_config tchi_config_defaults(void);

/* Sets adamw.lr and adamw.base_lr where they are 0 in `next`: adamw.lr for methods that give AdamW a share of lr, and
 * base_lr to the lr of the configuration that sets adamw.lr. `now` is the current configuration; NULL for a new
 * group. */
void tchi_config_fix_ratio(tch_optim_config *next, const tch_optim_config *now);

/* The ratio of AdamW's learning rate to lr, or 0 if there is none; and AdamW's learning rate. */
double tchi_config_adamw_ratio(const tch_optim_config *config);
double tchi_config_adamw_lr(const tch_optim_config *config);

/* Checks that every option is within its range. The message names the option and its value. */
tch_status tchi_config_check(const char *function, const tch_optim_config *config);

/* Checks that `next` differs from `now` only in options that may change between steps. */
tch_status tchi_config_check_change(const tch_optim_config *now, const tch_optim_config *next);

/* For an optimizer's checks: the message for a value out of range; beta2 below 1; and an option that was 0 when the
 * optimizer was created, so that it has no state. */
tch_status tchi_config_refuse(const char *function, const char *name, double value, const char *range);
tch_status tchi_config_check_beta2(const char *function, const tch_optim_config *config);
tch_status tchi_config_check_kept(const char *name, double now, double next);

#endif
