# Finds the OpenBLAS that libtorchium opens at run time: its path is compiled in as the first one to try. Nothing is
# linked and nothing fails when there is none; the library then looks again on the machine where it runs. The OpenMP
# build comes first wherever it is installed beside others: it shares one pool of threads with our own loops.

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
    DOC "The OpenBLAS to try first at run time")
mark_as_advanced(TORCHIUM_OPENBLAS)

if(TORCHIUM_OPENBLAS)
    set(openblas_summary "${TORCHIUM_OPENBLAS}, opened at run time")
else()
    set(openblas_summary "not found: looked for again at run time (Debian, Ubuntu: apt-get install libopenblas0-openmp)")
endif()
