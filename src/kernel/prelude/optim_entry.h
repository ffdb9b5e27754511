/* Put behind the user's source: the kernel that calls the user's function, TCHI_UPDATE_CALL, for every element. A
 * source's macros are still in force here, so that no name is used that could be one of them. The function must be the
 * one that was asked for: one that took its element by value would change nothing, and nobody would notice. */
__device__ char tchi_update_expects(void (*)(tch_element &, const tch_numbers &));

struct tchi_update_call {
    static __device__ __forceinline__ void tchi_on(tch_element &tchi_e, const tch_numbers &tchi_k)
    {
        static_assert(sizeof(tchi_update_expects(&TCHI_UPDATE_CALL)) == 1, "");
        TCHI_UPDATE_CALL(tchi_e, tchi_k);
    }
};

__global__ void __launch_bounds__(TCHI_UPDATE_THREADS)
    tchi_update_kernel(const __grid_constant__ tchi_update_list tchi_list)
{
    tchi_update::update<tchi_update_call>(tchi_list);
}
