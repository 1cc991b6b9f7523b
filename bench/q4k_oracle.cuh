// What the micro-benchmarks of Q4_K mat-vecs share: the formats, and the one-column kernel that every candidate must equal.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <vector>
#include <algorithm>
#include <cuda_fp16.h>
#define CK(x) do{cudaError_t e=(x); if(e){printf("%s line %d\n",cudaGetErrorString(e),__LINE__);exit(1);}}while(0)
struct bq4{ half2 dm; uint8_t sc[12]; uint8_t qs[128]; };
struct bq8{ half2 ds; int8_t qs[32]; };
// ---- oracle: the order of stock's one-column kernel
__device__ __forceinline__ void scales(const bq4*b,int j,uint8_t*sc,uint8_t*m){
  const uint16_t*s=(const uint16_t*)b->sc; uint16_t a0,a1;
  if(j<2){a0=s[j]&0x3f3f;a1=s[j+2]&0x3f3f;} else {a0=((s[j+2]>>0)&0x0f0f)|((s[j-2]&0xc0c0)>>2);a1=((s[j+2]>>4)&0x0f0f)|((s[j]&0xc0c0)>>2);}
  sc[0]=a0&255;sc[1]=a0>>8;m[0]=a1&255;m[1]=a1>>8;
}
__device__ __forceinline__ float dotref(const bq4*b,const bq8*y,int slot){
  const int off=2*(slot/4); const int*q=(const int*)(b->qs+16*off+4*(slot%4)); int v0=q[0],v1=q[4];
  uint8_t sc[2],m[2]; scales(b,off/2,sc,m); float sd=0,sm=0;
#pragma unroll
  for(int i=0;i<2;i++){ const bq8*yy=y+off+i; float d8=__low2float(yy->ds); const int*q8=(const int*)yy->qs+(slot%4); int u0=q8[0],u1=q8[4];
    int a=(v0>>(4*i))&0x0F0F0F0F,c=(v1>>(4*i))&0x0F0F0F0F;
    int d1=__dp4a(c,u1,__dp4a(a,u0,0)); int d2=__dp4a(0x01010101,u1,__dp4a(0x01010101,u0,0));
    sd+=d8*(d1*sc[i]); sm+=d8*(d2*m[i]); }
  float2 f=__half22float2(b->dm); return f.x*sd-f.y*sm;
}
__device__ __forceinline__ float wsum(float x){
#pragma unroll
  for(int o=16;o>0;o>>=1) x+=__shfl_xor_sync(~0u,x,o,32); return x;}
template<int C,int NW,int R> __launch_bounds__(NW*32,1) __global__ void ref(const bq4*x,const bq8*y,float*dst,int nb,int nrows){
  int tid=32*threadIdx.y+threadIdx.x,row0=R*blockIdx.x; float t[C][R]={{0}};
  for(int k=tid/16;k<nb;k+=2*NW)
#pragma unroll
    for(int c=0;c<C;c++)
#pragma unroll
      for(int r=0;r<R;r++) t[c][r]+=dotref(x+(size_t)(row0+r)*nb+k,y+(size_t)c*nb*8+k*8,tid%16);
  __shared__ float sh[NW>1?NW-1:1][C][R][32];
  if(threadIdx.y>0){
#pragma unroll
    for(int c=0;c<C;c++)
#pragma unroll
      for(int r=0;r<R;r++) sh[threadIdx.y-1][c][r][threadIdx.x]=t[c][r]; }
  __syncthreads(); if(threadIdx.y>0)return;
#pragma unroll
  for(int c=0;c<C;c++)
#pragma unroll
    for(int r=0;r<R;r++){
#pragma unroll
      for(int l=0;l<NW-1;l++) t[c][r]+=sh[l][c][r][threadIdx.x];
      t[c][r]=wsum(t[c][r]); if(threadIdx.x==r) dst[(size_t)c*nrows+row0+r]=t[c][r]; }
}
