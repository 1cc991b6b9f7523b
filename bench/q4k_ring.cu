// A micro-benchmark: the exact Q4_K mat-vec over several columns that became patch 0113 (NVIDIA, sm_80 or newer), in many geometries.
// Same additions in the same order as the one-column kernel, other instructions: what docs/price.md describes.
// Every variant is compared with the one-column kernel bit for bit, then timed. Dense on purpose: it is meant to be tried and
// thrown away. Against q4k_fast.cu, weights pass through a ring of stages in shared memory, filled by asynchronous copies, and
// the first addition of each warp of the one-column kernel is left out (it adds to a zero).
// Build: nvcc -O3 -std=c++17 -use_fast_math -gencode=arch=compute_90,code=sm_90 -o q4k_ring q4k_ring.cu
// Run:   ./q4k_ring [K] [rows] [matrices]     Output on an H200: data/compiled/q4k_ring-h200.txt
// With -DBULK columns come by bulk copies:        data/compiled/q4k_ring_bulk-h200.txt
#include <type_traits>
#include "q4k_packed.cuh"
// C columns, R rows a tile of one warp, W warps a block, D stages of a pair of blocks in each warp's ring.
template<int N> __device__ __forceinline__ void wg(){ asm volatile("cp.async.wait_group %0;"::"n"(N):"memory"); }
template<int C,int R,int W,int D> __launch_bounds__(32*W,1) __global__ void ring(const bq4*__restrict__ x,const char*__restrict__ P,float*__restrict__ dst,int nb,int nrows){
  extern __shared__ __align__(16) char sm[];
  const int np=nb/2, ntiles=nrows/R; const unsigned rs=nb*144u;
  const int lane=threadIdx.x&31,warp=threadIdx.x>>5,slot=lane&15,hi=lane>>4,j=slot>>2; constexpr int RC=rec(C),ST=R*288,NC=(R*18+31)/32;
  const unsigned cols=(unsigned)nb*RC, own=cols+warp*(R*256+D*ST), s0=(unsigned)__cvta_generic_to_shared(sm);
#ifdef BULK // tried: one bulk copy a step, waited for step by step instead of all together; sm_90 or newer
  __shared__ uint64_t ready[4]; // columns of the steps p with p%4 == i have arrived
  const unsigned r0=(unsigned)__cvta_generic_to_shared(ready);
  if(threadIdx.x==0){ for(int i=0;i<4;i++) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;"::"r"(r0+8*i)); asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  __syncthreads();
  if(warp==0){
    if(lane<4) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;"::"r"(r0+8*lane),"r"(lane<np?(np-lane+3)/4*2*RC:0):"memory");
    __syncwarp();
    for(int i=0;i<4;i++) for(int p=i+4*lane;p<np;p+=128)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"::"r"(s0+p*2*RC),"l"(P+(size_t)p*2*RC),"r"(2*RC),"r"(r0+8*i):"memory"); }
#else
  for(unsigned k=threadIdx.x*16;k<cols;k+=32*W*16) cpa(s0+k,P+k);
  COMMIT();
#endif
  auto keep=[&](unsigned v){ return __shfl_sync(~0u,v,lane); };
  const int dr=lane>>3,db=(lane>>2)&1,dj=lane&3;
  const unsigned vofs=keep(own+R*256+hi*144u+16+32*j+4*(slot&3)), hofs=keep(own+R*256+dr*288u+db*144u), decw=keep(own+((db*R+dr)*4+dj)*32u), decr=keep(own+(hi*R*4+j)*32u);
  const unsigned uofs=keep(hi*RC+slot*16u), eofs=keep(hi*RC+256*C+slot*8u), dofs=keep(hi*RC+384*C+j*8u);
  const unsigned dsel=(dj&1)*2u, sa0=keep(0x7650|dsel), sa1=keep(0x7651|dsel); const bool low=dj<2;
  const unsigned dst0=s0+own+R*256+lane*16;
  bool first=true;
  for(int tile=warp*gridDim.x+blockIdx.x;;tile+=W*gridDim.x){
#ifdef BULK
    if(tile>=ntiles) break;
#else
    if(tile>=ntiles){ if(first){ wg<0>(); __syncthreads(); } break; }
#endif
    const char*gp[NC];
#pragma unroll
    for(int k=0;k<NC;k++){ int q=min(lane+32*k,R*18-1); gp[k]=(const char*)x+((size_t)tile*R+q/18)*rs+16*(q%18); }
    float t[R*C],s[R*C];
#pragma unroll
    for(int i=0;i<R*C;i++) s[i]=-0.f;
    int pl=0; unsigned so=0;
    auto load=[&](){ if(pl<np){
#pragma unroll
        for(int k=0;k<NC;k++) if(k<NC-1||lane+32*k<R*18) cpa(dst0+so+512*k,gp[k]+pl*288u);
        pl+=4; if(pl>=np){ pl=(pl&3)+1; if(pl==4) pl=np; } } COMMIT(); so+=ST; if(so==D*ST) so=0; };
#pragma unroll
    for(int k=0;k<D-1;k++) load();
#ifndef BULK
    if(first){ wg<D-1>(); __syncthreads(); }
#endif
    unsigned sr=0;
    auto step=[&](const int p,auto fresh){
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
          const float v=__fmaf_rn(B[r].z,sd,-__fmul_rn(B[r].w,sq)); if constexpr(decltype(fresh)::value) t[r*C+c]=v; else t[r*C+c]=__fadd_rn(t[r*C+c],v); } }
      sr+=ST; if(sr==D*ST) sr=0;
    };
#pragma unroll 1
    for(int w=0;w<4&&w<np;w++){
#ifdef BULK
      if(first){ unsigned done; do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],0; selp.u32 %0,1,0,p; }":"=r"(done):"r"(r0+8*w):"memory"); while(!done); }
#endif
      step(w,std::true_type{});
      if(w==0){
#pragma unroll
        for(int k=0;k<R*C;k++) t[k]=__fadd_rn(t[k],0.f); }
#pragma unroll 1
      for(int p=w+4;p<np;p+=4) step(p,std::false_type{});
#pragma unroll
      for(int k=0;k<R*C;k++) s[k]=__fadd_rn(s[k],t[k]);
    }
    first=false;
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
#ifdef VARIANTS_INC
#include VARIANTS_INC
#else
  F(1,4,16,4) F(1,8,16,3) F(2,4,16,4) F(2,8,12,3) F(3,4,12,4) F(4,4,12,4) F(4,4,16,4) F(4,8,8,4) F(5,4,12,4) F(6,4,12,4) F(6,4,8,6) F(8,4,12,4) F(8,4,12,6) F(8,4,8,6) F(8,4,8,3) F(9,4,8,6) F(9,4,8,3) F(9,4,12,4) F(10,4,8,3) F(12,4,8,3) F(12,2,12,4) F(14,2,12,3) F(16,2,12,3) F(16,2,8,4)
#endif
  return 0; }
