/* What the host pays for a launch by the bytes of its parameters, and for a graph by its nodes: why lists travel by
 * value and steps are recorded. Each figure is the smallest mean of five rounds, in microseconds. Not part of the
 * build:
 *
 *     nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/parameters_bench.cu
 *
 * On one H200: 5 to 6 us a launch, 8 to 9 with 32000 bytes; a graph 2.3 us, 5.5 with 1000 nodes, made in 6 us a node.
 */
#include <chrono>

#include "common.cuh"

enum { LAUNCHES = 100, ROUNDS = 5 };

template <int bytes> struct parameters {
    char data[bytes];
};

template <int bytes> static __global__ void reads(const __grid_constant__ parameters<bytes> p, char *out)
{
    if (out != nullptr) {
        *out = p.data[threadIdx.x % bytes];
    }
}

/* Keeps the stream busy, so that launches only queue. */
static __global__ void spins(long long cycles)
{
    long long end = clock64() + cycles;
    while (clock64() < end) {
    }
}

static double now(void)
{
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* `work` LAUNCHES times, behind a long kernel or on an idle device, synchronizing after each. */
template <typename function> static double time_of(cudaStream_t stream, bool busy, function work)
{
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        double total = 0;
        if (busy) {
            spins<<<1, 1, 0, stream>>>(50'000'000);
        }
        for (int i = 0; i < LAUNCHES; i++) {
            double start = now();
            work();
            total += now() - start;
            if (!busy) {
                must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
            }
        }
        must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        best = total / LAUNCHES < best ? total / LAUNCHES : best;
    }
    return best;
}

template <int bytes> static void report_launch(cudaStream_t stream)
{
    static parameters<bytes> p;
    auto launch = [&] { reads<bytes><<<1, 32, 0, stream>>>(p, nullptr); };
    launch();
    must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    printf("%6d bytes of parameters: idle %6.2f, queued %6.2f us a launch\n", bytes, time_of(stream, false, launch),
           time_of(stream, true, launch));
}

template <int bytes> static void report_graph(cudaStream_t stream, int nodes)
{
    static parameters<bytes> p;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    for (int i = 0; i < nodes; i++) {
        reads<bytes><<<1, 32, 0, stream>>>(p, nullptr);
    }
    must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    double start = now();
    must(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    double made = now() - start;
    auto launch = [&] { must(cudaGraphLaunch(executable, stream), "cudaGraphLaunch"); };
    launch();
    must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    printf("graph of %4d nodes with %6d bytes: idle %6.2f, queued %6.2f us a launch; made in %7.1f us\n", nodes, bytes,
           time_of(stream, false, launch), time_of(stream, true, launch), made);
    must(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

int main(void)
{
    cudaStream_t stream;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    report_launch<64>(stream);
    report_launch<1024>(stream);
    report_launch<2048>(stream);
    report_launch<4000>(stream);
    report_launch<6000>(stream);
    report_launch<8192>(stream);
    report_launch<16384>(stream);
    report_launch<32000>(stream);
    for (int nodes : {1, 10, 100, 1000}) {
        report_graph<64>(stream, nodes);
    }
    report_graph<4000>(stream, 10);
    report_graph<32000>(stream, 10);
    return 0;
}
