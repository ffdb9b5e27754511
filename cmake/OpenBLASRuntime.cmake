# Finds an OpenBLAS for libtorchium to open at run time: its path is compiled in as one to try. Nothing is linked and
# nothing fails when there is none; the library then looks again on the machine where it runs. The OpenMP build comes
# first wherever it is installed with others: it shares one pool of threads with our own loops.

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

# Where the system has none: the one that pip put into the checkout's own environment, so that root is not needed. Not in
# the cache, since the system's may be installed later; not in a wheel, which has a dependency of its own.
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
