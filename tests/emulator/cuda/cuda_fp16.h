/* The half types are the prelude's: see emulator.h. */
#include "emulator.h"
