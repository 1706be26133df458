// CKPT_HD: a function that host code and CUDA threads both call.
#pragma once

#ifdef __CUDACC__
#define CKPT_HD __host__ __device__ __forceinline__
#else
#define CKPT_HD inline
#endif
