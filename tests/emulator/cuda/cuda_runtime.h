/* Included before every .cu file, by nvcc and by the emulator's CMake. */
#include "emulator.h"
