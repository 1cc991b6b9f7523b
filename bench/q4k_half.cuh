// What the two tensor-core micro-benchmarks share: asynchronous copies, arithmetic on pairs of halves, the matrix product of 16 x 8 x 8.
#pragma once
#include "q4k_oracle.cuh"
__device__ __forceinline__ void cpa(unsigned s,const void*g){ asm volatile("cp.async.cg.shared.global [%0],[%1],16;"::"r"(s),"l"(g)); }
__device__ __forceinline__ void commit(){ asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ unsigned h2fma(unsigned a,unsigned b,unsigned c){ unsigned d; asm("fma.rn.f16x2 %0,%1,%2,%3;":"=r"(d):"r"(a),"r"(b),"r"(c)); return d; }
__device__ __forceinline__ unsigned h2mul(unsigned a,unsigned b){ unsigned d; asm("mul.rn.f16x2 %0,%1,%2;":"=r"(d):"r"(a),"r"(b)); return d; }
__device__ __forceinline__ unsigned h2add(unsigned a,unsigned b){ unsigned d; asm("add.rn.f16x2 %0,%1,%2;":"=r"(d):"r"(a),"r"(b)); return d; }
__device__ __forceinline__ float b2f(unsigned w,unsigned sel){ return __uint_as_float(__byte_perm(w,0x4B000000u,sel))-8388608.f; }
__device__ __forceinline__ void mma8(float*p,unsigned a0,unsigned a1,unsigned b){
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};":"=f"(p[0]),"=f"(p[1]),"=f"(p[2]),"=f"(p[3]):"r"(a0),"r"(a1),"r"(b),"f"(0.f)); }
constexpr unsigned H_1024N=0xE400E400u, H_64N=0xD400D400u, H_16TH=0x2C002C00u, H_1152N=0xE480E480u;
