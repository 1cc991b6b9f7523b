// What q4k_fast.cu and q4k_ring.cu share: packed columns, arithmetic without conversions, and sums folded over the lanes.
#pragma once
#include "q4k_oracle.cuh"
// A packed record for each 256 columns' values of all C columns: U int4[C][16], E float2[C][16], D float2[C][4].
__host__ __device__ constexpr int rec(int C){ return 416*C; }
template<int C> __global__ void pack(const bq8*y,char*P,int nb){
  int i=blockIdx.x*blockDim.x+threadIdx.x; if(i>=nb*C*16)return; int s=i%16,c=(i/16)%C,b=i/16/C;
  const bq8*yy=y+(size_t)c*nb*8+b*8+2*(s/4); int4 u; float d[2],e[2];
  for(int k=0;k<2;k++){ const int*q=(const int*)yy[k].qs+(s%4); int a=q[0],bb=q[4]; (k?u.z:u.x)=a; (k?u.w:u.y)=bb; d[k]=__low2float(yy[k].ds); e[k]=d[k]*(float)__dp4a(0x01010101,bb,__dp4a(0x01010101,a,0)); }
  char*p=P+(size_t)b*rec(C); ((int4*)p)[c*16+s]=u; ((float2*)(p+256*C))[c*16+s]=make_float2(e[0],e[1]); if(s%4==0)((float2*)(p+384*C))[c*4+s/4]=make_float2(d[0],d[1]);
}
constexpr float MG=12582912.f; constexpr int MI=0x4B400000;
__device__ __forceinline__ int dp4us(unsigned a,int b,int c){ int d; asm("dp4a.u32.s32 %0,%1,%2,%3;":"=r"(d):"r"(a),"r"(b),"r"(c)); return d; }
__device__ __forceinline__ float b2f(unsigned w,unsigned sel){ return __uint_as_float(__byte_perm(w,0x4B000000u,sel))-8388608.f; }
__device__ __forceinline__ void cpa(unsigned s,const void*g){ asm volatile("cp.async.cg.shared.global [%0],[%1],16;"::"r"(s),"l"(g)); }
#define COMMIT() asm volatile("cp.async.commit_group;")
template<int N> __device__ __forceinline__ void waitg(){ asm volatile("cp.async.wait_group %0;"::"n"(N)); }
template<int N> __device__ __forceinline__ void halve(float*v,int lane,int o){
#pragma unroll
  for(int i=0;i<N/2;i++){ float mine=(lane&o)?v[i+N/2]:v[i], give=(lane&o)?v[i]:v[i+N/2]; v[i]=mine+__shfl_xor_sync(~0u,give,o,32);} }
// fold N values (a power of two, 32 at most) over the lanes; afterwards the lane holds value number `keep` if `first`
template<int N> __device__ __forceinline__ float fold(float*v,int lane,int&keep,bool&first){
  keep=0; int o=16;
  if constexpr(N>=2){ halve<N>(v,lane,16); keep=((lane>>4)&1); o=8; }
  if constexpr(N>=4){ halve<N/2>(v,lane,8); keep=keep*2+((lane>>3)&1); o=4; }
  if constexpr(N>=8){ halve<N/4>(v,lane,4); keep=keep*2+((lane>>2)&1); o=2; }
  if constexpr(N>=16){ halve<N/8>(v,lane,2); keep=keep*2+((lane>>1)&1); o=1; }
  if constexpr(N>=32){ halve<N/16>(v,lane,1); keep=keep*2+(lane&1); o=0; }
  float x=v[0]; for(int k=o;k>0;k>>=1) x+=__shfl_xor_sync(~0u,x,k,32);
  first=(lane&(2*o-1))==0||o==0; return x;
}
// keep: halving gives lane bits to value bits from the top: bit16 -> N/2, bit8 -> N/4, ...
template<int V,int OFF,class F> __device__ __forceinline__ void fold_all(float*v,int lane,F store){
  if constexpr(OFF<V){ constexpr int L=V-OFF; constexpr int N=L>=32?32:L>=16?16:L>=8?8:L>=4?4:L>=2?2:1;
    int keep;bool first; float x=fold<N>(v+OFF,lane,keep,first); if(first)store(OFF+keep,x); fold_all<V,OFF+N>(v,lane,store); }
}
