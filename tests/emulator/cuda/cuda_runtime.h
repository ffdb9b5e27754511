/* What nvcc includes before every .cu file, and CMake here. */
#include "emulator.h"
