# Finds an OpenBLAS for libtorchium to load at run time: its path is compiled in as a candidate. Nothing is linked and a
# missing one is not an error; the library searches again at run time. The OpenMP build is preferred: it shares a thread
# pool with the library's own loops.

set(multiarch "${CMAKE_LIBRARY_ARCHITECTURE}")
find_file(TORCHIUM_OPENBLAS
    NAMES
        openblas-openmp/libopenblas.so.0 # Debian, Ubuntu
        libopenblaso.so.0                # Fedora and its relatives
        libopenblas.so.0
        libopenblas.so
        openblas-pthread/libopenblas.so.0
    PATHS /usr/lib/${multiarch} /usr/lib64 /usr/lib /usr/local/lib /opt/homebrew/opt/openblas/lib
    NO_DEFAULT_PATH
    DOC "An OpenBLAS to try at run time")
mark_as_advanced(TORCHIUM_OPENBLAS)

# If the system has none: pip's in the checkout's .venv, so that root is not needed. Not cached, since the system's may
# be installed later; not in a wheel, which has its own dependency.
if(NOT TORCHIUM_OPENBLAS AND NOT SKBUILD)
    file(GLOB openblas_of_pip
        "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/scipy_openblas32/lib/libscipy_openblas.so")
    if(openblas_of_pip)
        list(GET openblas_of_pip 0 TORCHIUM_OPENBLAS)
    endif()
endif()

if(TORCHIUM_OPENBLAS)
    set(openblas_summary "${TORCHIUM_OPENBLAS}, opened at run time")
else()
    set(openblas_summary "not found: looked for again at run time (pip install scipy-openblas32)")
endif()
