// A micro-benchmark: the exact Q4_K mat-vec over several columns that became patch 0113 (NVIDIA, sm_80 or newer), in many geometries.
// Same additions in the same order as the one-column kernel, other instructions: what docs/price.md describes.
// Every variant is compared with the one-column kernel bit for bit, then timed. Dense on purpose: it is meant to be tried and
// thrown away. Against q4k_fast.cu, weights pass through a ring of stages in shared memory, filled by asynchronous copies.
// Build: nvcc -O3 -std=c++17 -use_fast_math -gencode=arch=compute_90,code=sm_90 -o q4k_ring q4k_ring.cu
// Run:   ./q4k_ring [K] [rows] [matrices]     Output on an H200: data/compiled/q4k_ring-h200.txt
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
// ---- the candidate
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
// C columns, R rows a tile of one warp, W warps a block, D stages of a pair of blocks in each warp's ring.
template<int N> __device__ __forceinline__ void wg(){ asm volatile("cp.async.wait_group %0;"::"n"(N):"memory"); }
template<int C,int R,int W,int D> __launch_bounds__(32*W,1) __global__ void ring(const bq4*__restrict__ x,const char*__restrict__ P,float*__restrict__ dst,int nb,int nrows){
  extern __shared__ __align__(16) char sm[];
  const int lane=threadIdx.x&31,warp=threadIdx.x>>5,slot=lane&15,hi=lane>>4,j=slot>>2; constexpr int RC=rec(C),ST=R*288,NC=(R*18+31)/32;
  const unsigned cols=(unsigned)nb*RC, own=cols+warp*(R*256+D*ST), s0=(unsigned)__cvta_generic_to_shared(sm);
  const int np=nb/2, ntiles=nrows/R; const unsigned rs=nb*144u;
  for(unsigned k=threadIdx.x*16;k<cols;k+=32*W*16) cpa(s0+k,P+k);
  COMMIT();
  auto keep=[&](unsigned v){ return __shfl_sync(~0u,v,lane); };
  const int dr=lane>>3,db=(lane>>2)&1,dj=lane&3;
  const unsigned vofs=keep(own+R*256+hi*144u+16+32*j+4*(slot&3)), hofs=keep(own+R*256+dr*288u+db*144u), decw=keep(own+((db*R+dr)*4+dj)*32u), decr=keep(own+(hi*R*4+j)*32u);
  const unsigned uofs=keep(hi*RC+slot*16u), eofs=keep(hi*RC+256*C+slot*8u), dofs=keep(hi*RC+384*C+j*8u);
  const unsigned dsel=(dj&1)*2u, sa0=keep(0x7650|dsel), sa1=keep(0x7651|dsel); const bool low=dj<2;
  const unsigned dst0=s0+own+R*256+lane*16;
  bool first=true;
  for(int tile=warp*gridDim.x+blockIdx.x;;tile+=W*gridDim.x){
    if(tile>=ntiles){ if(first){ wg<0>(); __syncthreads(); } break; }
    const char*gp[NC];
#pragma unroll
    for(int k=0;k<NC;k++){ int q=min(lane+32*k,R*18-1); gp[k]=(const char*)x+((size_t)tile*R+q/18)*rs+16*(q%18); }
    float t[R*C],s[R*C];
#pragma unroll
    for(int i=0;i<R*C;i++){ t[i]=0; s[i]=-0.f; }
    int pl=0; unsigned so=0;
    auto load=[&](){ if(pl<np){
#pragma unroll
        for(int k=0;k<NC;k++) if(k<NC-1||lane+32*k<R*18) cpa(dst0+so+512*k,gp[k]+pl*288u);
        pl+=4; if(pl>=np){ pl=(pl&3)+1; if(pl==4) pl=np; } } COMMIT(); so+=ST; if(so==D*ST) so=0; };
#pragma unroll
    for(int k=0;k<D-1;k++) load();
    if(first){ wg<D-1>(); __syncthreads(); first=false; }
    unsigned sr=0; int p=0;
    while(p<np){
      wg<D-2>(); __syncwarp(); load();
#pragma unroll
      for(int q=0;q<(R+3)/4;q++) if(R%4==0||dr+4*q<R){ const uint4 H=*(const uint4*)(sm+hofs+sr+q*4*288);
        unsigned sw=low?(H.y&0x3f3f3f3fu):((H.w&0x0f0f0f0fu)|((H.y>>2)&0x30303030u));
        unsigned mw=low?(H.z&0x3f3f3f3fu):(((H.w>>4)&0x0f0f0f0fu)|((H.z>>2)&0x30303030u));
        float a0=b2f(sw,sa0),a1=b2f(sw,sa1)*0.0625f,m0=b2f(mw,sa0),m1=b2f(mw,sa1);
        float2 f=__half22float2(*(half2*)&H.x);
        float4*o=(float4*)(sm+decw+q*4*128); o[0]=make_float4(a0,a1,-MG*a0,-MG*a1); o[1]=make_float4(m0,m1,f.x,f.y); }
      unsigned a0[R],a1[R],b0[R],b1[R];
#pragma unroll
      for(int r=0;r<R;r++){ const unsigned v0=*(const unsigned*)(sm+vofs+sr+r*288),v1=*(const unsigned*)(sm+vofs+sr+r*288+16); a0[r]=v0&0x0F0F0F0Fu;a1[r]=v0&0xF0F0F0F0u;b0[r]=v1&0x0F0F0F0Fu;b1[r]=v1&0xF0F0F0F0u; }
      __syncwarp();
      float4 A[R],B[R];
#pragma unroll
      for(int r=0;r<R;r++){ const float4*o=(const float4*)(sm+decr+r*128); A[r]=o[0];B[r]=o[1]; }
      const char*cb=sm+p*(unsigned)(2*RC);
#pragma unroll
      for(int c=0;c<C;c++){ const int4 u=*(const int4*)(cb+uofs+c*256); const float2 e=*(const float2*)(cb+eofs+c*128),d=*(const float2*)(cb+dofs+c*32);
#pragma unroll
        for(int r=0;r<R;r++){
          float x0=__int_as_float(dp4us(b0[r],u.y,dp4us(a0[r],u.x,MI))), x1=__int_as_float(dp4us(b1[r],u.w,dp4us(a1[r],u.z,MI)));
          float p0=__fmaf_rn(x0,A[r].x,A[r].z), p1=__fmaf_rn(x1,A[r].y,A[r].w);
          float sd=__fmaf_rn(d.y,p1,__fmul_rn(d.x,p0)), sq=__fmaf_rn(e.y,B[r].y,__fmul_rn(e.x,B[r].x));
          t[r*C+c]=__fadd_rn(t[r*C+c],__fmaf_rn(B[r].z,sd,-__fmul_rn(B[r].w,sq))); } }
      sr+=ST; if(sr==D*ST) sr=0;
      p+=4;
      if(p>=np){ p=(p&3)+1; if(p==4) p=np;
#pragma unroll
        for(int k=0;k<R*C;k++){ s[k]=__fadd_rn(s[k],t[k]); t[k]=0; } }
    }
    wg<0>(); __syncwarp();
    fold_all<R*C,0>(s,lane,[&](int k,float v){ dst[(size_t)(k%C)*nrows+tile*R+k/C]=v; });
  }
}
template<int C,int R,int W,int D> size_t smem(int nb){ return (size_t)nb*rec(C)+(size_t)W*(R*256+D*R*288); }
// return (size_t)nb*rec(C)+W*(R*256*2)+(NW==4?(size_t)(W/4)*R*C*4*32*4:0); }
static float rnd(){return rand()/(float)RAND_MAX;}
int main(int argc,char**argv){
  int K=argc>1?atoi(argv[1]):4096,N=argc>2?atoi(argv[2]):12288,nm=argc>3?atoi(argv[3]):24; const char*only=argc>4?argv[4]:nullptr; int nb=K/256; const int CM=16;
  cudaDeviceProp pr; CK(cudaGetDeviceProperties(&pr,0)); const int SM=pr.multiProcessorCount;
  std::vector<bq4> hx((size_t)N*nb); srand(1); for(auto&b:hx){ b.dm=__floats2half2_rn(0.0005f+0.001f*rnd(),0.004f*rnd()); for(auto&s:b.sc)s=rand(); for(auto&q:b.qs)q=rand(); }
  std::vector<bq8> hy((size_t)CM*nb*8); for(auto&b:hy){ b.ds=__floats2half2_rn(0.01f*rnd()+0.001f,0); for(auto&q:b.qs)q=rand()%255-127; }
  bq4*x; bq8*y; float*d1,*d2; char*P; size_t xs=hx.size()*sizeof(bq4); CK(cudaMalloc(&x,xs*nm)); for(int i=0;i<nm;i++)CK(cudaMemcpy((char*)x+xs*i,hx.data(),xs,cudaMemcpyHostToDevice));
  CK(cudaMalloc(&y,hy.size()*sizeof(bq8)));CK(cudaMemcpy(y,hy.data(),hy.size()*sizeof(bq8),cudaMemcpyHostToDevice));CK(cudaMalloc(&d1,4*(size_t)N*16));CK(cudaMalloc(&d2,4*(size_t)N*16));CK(cudaMalloc(&P,(size_t)nb*rec(16)+256));
  cudaEvent_t e0,e1; cudaEventCreate(&e0);cudaEventCreate(&e1); dim3 b4(32,4),b2(32,2);
  for(int c=0;c<CM;c++) ref<1,4,1><<<N,b4>>>(x,y+(size_t)c*nb*8,d1+(size_t)c*N,nb,N); CK(cudaDeviceSynchronize());
  std::vector<float> h1((size_t)CM*N),h2((size_t)CM*N); CK(cudaMemcpy(h1.data(),d1,4*h1.size(),cudaMemcpyDeviceToHost));
  auto check=[&](int cols){ CK(cudaMemcpy(h2.data(),d2,4*h2.size(),cudaMemcpyDeviceToHost)); size_t bad=0; for(size_t i=0;i<(size_t)cols*N;i++) bad+=(*(uint32_t*)&h1[i]!=*(uint32_t*)&h2[i]); return bad; };
  auto timeit=[&](auto f,const char*n,int cols){ if(only){ f(x); CK(cudaDeviceSynchronize()); return; } CK(cudaMemset(d2,0xff,4*(size_t)N*16)); f(x); cudaError_t err=cudaDeviceSynchronize(); if(err){printf("%-30s %s\n",n,cudaGetErrorString(err));exit(1);} size_t bad=check(cols); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); CK(cudaDeviceSynchronize()); std::vector<float> ts; for(int rep=0;rep<9;rep++){ cudaEventRecord(e0); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); cudaEventRecord(e1); cudaEventSynchronize(e1); float ms; cudaEventElapsedTime(&ms,e0,e1); ts.push_back(ms/nm*1000); } std::sort(ts.begin(),ts.end()); CK(cudaGetLastError()); printf("%-30s cols %2d  %8.2f us  %6.0f GB/s  differing %zu of %zu\n",n,cols,ts[4],xs/ts[4]/1e3,bad,(size_t)cols*N); fflush(stdout); };
  printf("K=%d N=%d matrix %.1f MB x %d\n",K,N,xs/1e6,nm);
  timeit([&](bq4*p){ref<1,4,1><<<N,b4>>>(p,y,d2,nb,N);},"one column (stock geometry)",1);
  timeit([&](bq4*p){ref<8,2,2><<<N/2,b2>>>(p,y,d2,nb,N);},"stock 8: 2 warps x2 rows",8);
  timeit([&](bq4*p){ref<8,4,2><<<N/2,b4>>>(p,y,d2,nb,N);},"generic exact 8",8);
#define F(CC,RR,WW,DD) { size_t sz=smem<CC,RR,WW,DD>(nb); if(sz<=232448){ CK(cudaFuncSetAttribute(ring<CC,RR,WW,DD>,cudaFuncAttributeMaxDynamicSharedMemorySize,(int)sz)); pack<CC><<<(nb*CC*16+127)/128,128>>>(y,P,nb); int tiles=N/RR,grid=std::min(tiles,SM); timeit([&](bq4*p){ring<CC,RR,WW,DD><<<grid,32*WW,sz>>>(p,P,d2,nb,N);},"ring C=" #CC " R=" #RR " W=" #WW " D=" #DD,CC);} }
#define FP(CC) timeit([&](bq4*p){pack<CC><<<(nb*CC*16+127)/128,128>>>(y,P,nb);},"pack C=" #CC,CC);
  FP(8)
  F(1,4,16,4) F(1,8,16,3) F(2,4,16,4) F(2,8,12,3) F(3,4,12,4) F(4,4,12,4) F(4,4,16,4) F(4,8,8,4) F(5,4,12,4) F(6,4,12,4) F(6,4,8,6) F(8,4,12,4) F(8,4,12,6) F(8,4,8,6) F(8,4,8,3) F(9,4,8,6) F(9,4,8,3) F(9,4,12,4) F(10,4,8,3) F(12,4,8,3) F(12,2,12,4) F(14,2,12,3) F(16,2,12,3) F(16,2,8,4)
  return 0; }
