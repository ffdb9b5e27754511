# Decides whether the Python package is built: if Python 3.10 or newer and its headers are found, and the project is not
# part of another. The project's .venv comes first. Sets TORCHIUM_BUILD_PYTHON, and python_summary, a line of the
# summary.
if(PROJECT_IS_TOP_LEVEL AND NOT Python3_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    set(Python3_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
set(have_python OFF)
if(PROJECT_IS_TOP_LEVEL OR TORCHIUM_BUILD_PYTHON)
    find_package(Python3 3.10 COMPONENTS Interpreter Development.Module QUIET)
    set(have_python ${Python3_FOUND})
endif()
option(TORCHIUM_BUILD_PYTHON "Build the Python package (needs Python 3.10 and its headers)" ${have_python})

if(TORCHIUM_BUILD_PYTHON AND NOT have_python)
    message(FATAL_ERROR "TORCHIUM_BUILD_PYTHON is ON, but the headers of Python 3.10 or newer were not found "
                        "(Debian: python3-dev).")
endif()
if(TORCHIUM_BUILD_PYTHON)
    set(python_summary "package for 3.10 and newer, built with ${Python3_VERSION} (${Python3_EXECUTABLE})")
elseif(have_python)
    set(python_summary "not built: TORCHIUM_BUILD_PYTHON is OFF")
else()
    set(python_summary "not built: no headers of Python 3.10 or newer (Debian: python3-dev)")
endif()
