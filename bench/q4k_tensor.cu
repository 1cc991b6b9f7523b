// A micro-benchmark: an exact Q4_K mat-vec over 8, 12 or 16 columns on tensor cores, second design (NVIDIA, sm_90 or newer).
// The integer dot products, which are exact, run as half-precision matrix products with float accumulators; every float operation
// that rounds is the one-column kernel's, in its order. What differs from q4k_mma.cu: the four warps of a tile of 16 rows do not
// wait for each other until its end (each has its own ring), columns come by bulk copies and are waited for block by block, the
// first addition of a sum is left out, and a second eight columns cost half when only four of them are used. It wins at 15 and 16
// columns alone, by a tenth, and is not in the patches.
// Build: nvcc -O3 -std=c++17 -use_fast_math -gencode=arch=compute_90,code=sm_90 -o q4k_tensor q4k_tensor.cu
// Run:   ./q4k_tensor [K] [rows] [matrices]     Output on an H200: data/compiled/q4k_tensor-h200.txt
#include <type_traits>
#include "q4k_half.cuh"
// Packed columns, for a block of 256 values, a group j of 64 values and a tile n of 8 columns: 832 bytes.
// values: per lane (column g, quarter t) and slot {slice 0: 2 values, slice 1: 2 values} + 128; e[slot][column]{2 slices}; d[column]{2}
constexpr int CHK=832;
template<int NT> __global__ void pack(const bq8*y,char*P,int nb,int C){ // a thread for each (block, tile, j, slot, column)
  int i=blockIdx.x*blockDim.x+threadIdx.x; int n=i&7,sl=(i>>3)&3,j=(i>>5)&3; int r=i>>7; int tile=r%NT,b=r/NT; if(b>=nb)return;
  int c=tile*8+n; if(tile==1&&C<=12) c=(n&1)?C:8+n/2;
  const bq8*yy=y+(size_t)(c<C?c:0)*nb*8+b*8+2*j;
  char*p=P+((size_t)(b*4+j)*NT+tile)*CHK; float d[2],e[2];
  for(int k=0;k<2;k++){ d[k]=__low2float(yy[k].ds); int s=0; for(int q=0;q<4;q++) s+=yy[k].qs[4*sl+q]+yy[k].qs[16+4*sl+q]; e[k]=d[k]*(float)s; }
  for(int t=0;t<4;t++){ int o=(t>>1)*16+4*sl+2*(t&1); uint8_t*u=(uint8_t*)(p+(n*4+t)*16+sl*4); for(int k=0;k<2;k++){ u[2*k]=yy[k].qs[o]+128;u[2*k+1]=yy[k].qs[o+1]+128; } }
  char*q=p+512; ((float2*)q)[sl*8+n]=make_float2(e[0],e[1]); if(sl==0)((float2*)(q+256))[n]=make_float2(d[0],d[1]);
}
template<int n> __device__ __forceinline__ void waitg(){ asm volatile("cp.async.wait_group %0;"::"n"(n):"memory"); }
// HALF: of the last tile of columns only the even ones are used (9 to 12 columns).
template<int NT,bool HALF,int G,int D> __launch_bounds__(128*G,1) __global__ void tensor(const bq4*__restrict__ x,const char*__restrict__ P,float*__restrict__ dst,int nb,int nrows,int ncols,unsigned K64){
  extern __shared__ __align__(16) char sm[];
  const int lane=threadIdx.x&31,warp=threadIdx.x>>5,j=warp&3,grp=warp>>2,g=lane>>2,t=lane&3;
  constexpr int RB=4*CHK*NT,ST=16*48;
  constexpr int NV=HALF?16*NT-8:16*NT; // values of a lane
  const unsigned cols=(unsigned)nb*RB; float*scr=(float*)(sm+cols)+grp*(4*NV*32);
  const unsigned ring=cols+G*4*NV*128+warp*(D*ST);
  const int ntiles=(nrows+15)/16; const unsigned rs=nb*144u; const unsigned s0=(unsigned)__cvta_generic_to_shared(sm);
  __shared__ uint64_t ready[8]; // columns of the blocks b with b%8 == i have arrived
  const unsigned r0=(unsigned)__cvta_generic_to_shared(ready);
  if(threadIdx.x==0){ for(int i=0;i<8;i++) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;"::"r"(r0+8*i)); asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  __shared__ unsigned seq[256]; // offsets of a row's blocks in the order of use
  for(int b=threadIdx.x;b<nb;b+=128*G){ int i=0; for(int c=0;c<8;c++){ const int k=(c&3)*2+(c>>2); if(k==(b&7)) break; i+=(nb-k+7)/8; } seq[i+b/8]=b*144u; }
  __syncthreads();
  if(warp==0){
    if(lane<8) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;"::"r"(r0+8*lane),"r"(lane<nb?(nb-lane+7)/8*RB:0):"memory");
    __syncwarp();
    for(int i=lane;i<nb;i+=32){ const unsigned b=seq[i]/144u;
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"::"r"(s0+b*RB),"l"(P+(size_t)b*RB),"r"(RB),"r"(r0+8*(b&7)):"memory"); } }
  auto keep=[&](unsigned v){ return __shfl_sync(~0u,v,lane); };
  const unsigned psel=keep((t&1)?0x4342u:0x4140u), wofs=keep(ring+g*48u), qofs=keep(ring+g*48u+16u+16u*(t>>1));
  const unsigned bofs=keep(j*NT*CHK+16*lane), eofs=keep(j*NT*CHK+512+16*t);
  const unsigned o=(j&1)*2u; const unsigned xsel=keep(0x5410u+0x1111u*o); // bytes 2(j&1), 2(j&1)+1 of two words
  const unsigned xsh=keep(j>>1?2u:0u), xma=keep(j>>1?0x30303030u:0x3f3f3f3fu), xmb=keep(j>>1?0x0f0f0f0fu:0u);
  const unsigned dst0=s0+ring+lane*16; const bool two=lane<16;
  // the copies: chunk c of 48 is 16 bytes: row c/3, part c%3 (header, then the two halves of 32 bytes of nibbles)
  int ltile=grp*gridDim.x+blockIdx.x, li=0; unsigned lsl=0; const char*g0=nullptr,*g1=nullptr;
  auto ptr=[&](){ const int c0=lane,c1=32+lane; auto at=[&](int c){ const int p=c%3; return (const char*)x+(size_t)min(ltile*16+c/3,nrows-1)*rs+(p?32*j+16*p:0); }; g0=at(c0); g1=at(two?c1:c0); };
  ptr();
  auto load=[&](){ if(ltile<ntiles){ const unsigned o=seq[li]; cpa(dst0+lsl,g0+o); if(two) cpa(dst0+512+lsl,g1+o); if(++li==nb){ li=0; ltile+=G*gridDim.x; ptr(); } }
    commit(); lsl=lsl==(D-1)*ST?0:lsl+ST; };
#pragma unroll
  for(int k=0;k<D-1;k++) load();
  unsigned sr=0;
  float T[NV],S[NV];
  auto step=[&](int b,auto first){
    waitg<D-2>(); __syncwarp();
    load();
    const uint4 H0=*(const uint4*)(sm+wofs+sr),H1=*(const uint4*)(sm+wofs+sr+8*48),V0=*(const uint4*)(sm+qofs+sr),V1=*(const uint4*)(sm+qofs+sr+8*48);
    sr=sr==(D-1)*ST?0:sr+ST;
    unsigned c0[2],n0[2],c1[2],n1[2]; float m0[2],m1[2],dx[2],dy[2];
#pragma unroll
    for(int r=0;r<2;r++){ const uint4 H=r?H1:H0; unsigned X=__byte_perm(H.y,H.z,xsel); // s0 s1 m0 m1, or their upper bits
      X=((X>>xsh)&xma)|(__byte_perm(H.w,H.w>>4,xsel)&xmb);
      c0[r]=h2add(__byte_perm(X,0x64646464u,0x4040u),H_1024N);
      c1[r]=h2fma(__byte_perm(X,0x64646464u,0x4141u),H_16TH,H_64N);
      n0[r]=h2mul(c0[r],H_1024N); n1[r]=h2mul(c1[r],H_1024N);
      m0[r]=b2f(X,0x7652u); m1[r]=b2f(X,0x7653u); float2 f=__half22float2(*(const half2*)&H.x); dx[r]=f.x;dy[r]=f.y; }
    const char*cb=sm+b*(unsigned)RB; float4 Dd[NT]; uint4 Bq[NT];
#pragma unroll
    for(int n=0;n<NT;n++){ Bq[n]=*(const uint4*)(cb+bofs+n*CHK); Dd[n]=*(const float4*)(cb+eofs+n*CHK+256); }
#pragma unroll
    for(int sl=0;sl<4;sl++){ unsigned a[2],c[2];
#pragma unroll
      for(int r=0;r<2;r++){ const uint4 V=r?V1:V0; const unsigned v=sl==0?V.x:sl==1?V.y:sl==2?V.z:V.w; const unsigned w=__byte_perm(v,0,psel);
        a[r]=h2fma((w&0x000F000Fu)|K64,c0[r],n0[r]); c[r]=h2fma((w&0x00F000F0u)|K64,c1[r],n1[r]); }
#pragma unroll
      for(int n=0;n<NT;n++){ const uint4 z=Bq[n]; const unsigned u=sl==0?z.x:sl==1?z.y:sl==2?z.z:z.w;
        const unsigned b0=h2add(__byte_perm(u,0x64646464u,0x4140u),H_1152N), b1=h2add(__byte_perm(u,0x64646464u,0x4342u),H_1152N);
        float p0[4],p1[4]; mma8(p0,a[0],a[1],b0); mma8(p1,c[0],c[1],b1);
        const float4 E=*(const float4*)(cb+eofs+n*CHK+sl*64);
#pragma unroll
        for(int p=0;p<4;p++){ if(HALF&&n==NT-1&&(p&1)) continue; const int r=p>>1; const float d0=(p&1)?Dd[n].z:Dd[n].x,d1=(p&1)?Dd[n].w:Dd[n].y,e0=(p&1)?E.z:E.x,e1=(p&1)?E.w:E.y;
          const float sd=__fmaf_rn(d1,p1[p],__fmul_rn(d0,p0[p])), sq=__fmaf_rn(e1,m1[r],__fmul_rn(e0,m0[r]));
          const float v=__fmaf_rn(dx[r],sd,-__fmul_rn(dy[r],sq)); float&tt=T[n*16+((HALF&&n==NT-1)?sl*2+r:sl*4+p)];
          if constexpr(decltype(first)::value) tt=v; else tt=__fadd_rn(tt,v); } } }
  };

  bool fresh=true;
  for(int tile=grp*gridDim.x+blockIdx.x;tile<ntiles;tile+=G*gridDim.x){
#pragma unroll 1
    for(int h=0;h<2;h++){
#pragma unroll
      for(int i=0;i<NV;i++) S[i]=-0.f; // -0 + t is t in every bit
#pragma unroll 1
      for(int w=h;w<8&&w<nb;w+=2){
        if(fresh){ unsigned done; do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],0; selp.u32 %0,1,0,p; }":"=r"(done):"r"(r0+8*w):"memory"); while(!done); }
        step(w,std::true_type{});
        // The one-column kernel starts from 0: its first warp's sum is never -0. What the other warps' zeros are no longer matters then.
        if(w==h){
#pragma unroll
          for(int i=0;i<NV;i++) T[i]=__fadd_rn(T[i],0.f); }
#pragma unroll 1
        for(int b=w+8;b<nb;b+=8) step(b,std::false_type{});
#pragma unroll
        for(int i=0;i<NV;i++) S[i]=__fadd_rn(S[i],T[i]);
      }
      if(h==0){
#pragma unroll
        for(int i=0;i<NV;i++) scr[(j*NV+i)*32+lane]=S[i]; }
    }
    fresh=false;
#pragma unroll
    for(int i=0;i<NV;i++){ float*z=scr+(j*NV+i)*32+lane; *z=__fadd_rn(*z,S[i]); }
    asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
    // result q of a tile of columns: (row half, column parity), or the row half alone where only even columns are used; a warp takes q = j
#pragma unroll
    for(int n=0;n<NT;n++){ const bool hf=HALF&&n==NT-1; if(hf&&j>=2) continue;
      float Y[4];
#pragma unroll
      for(int sl=0;sl<4;sl++){ const float*z=scr+(n*16+(hf?sl*2+j:sl*4+j))*32+lane; constexpr int js=NV*32; Y[sl]=__fadd_rn(__fadd_rn(z[0],z[2*js]),__fadd_rn(z[js],z[3*js])); }
      const int r=hf?j:j>>1, row=tile*16+g+8*r, col=hf?n*8+t:n*8+2*t+(j&1);
      if(row<nrows&&col<ncols) dst[(size_t)col*nrows+row]=__fadd_rn(__fadd_rn(Y[0],Y[2]),__fadd_rn(Y[1],Y[3])); }
    asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
  }
}
template<int NT,bool HALF,int G,int D> size_t smem(int nb){ constexpr int NV=HALF?16*NT-8:16*NT; return (size_t)nb*4*CHK*NT+(size_t)G*4*NV*128+(size_t)G*4*D*768; }
static float rnd(){return rand()/(float)RAND_MAX;}
int main(int argc,char**argv){
  int K=argc>1?atoi(argv[1]):4096,N=argc>2?atoi(argv[2]):12288,nm=argc>3?atoi(argv[3]):24; int nb=K/256; const int CM=16; const char*only=argc>4?argv[4]:nullptr;
  cudaDeviceProp pr; CK(cudaGetDeviceProperties(&pr,0)); const int SM=pr.multiProcessorCount;
  std::vector<bq4> hx((size_t)N*nb); srand(1); for(auto&b:hx){ b.dm=__floats2half2_rn(0.0005f+0.001f*rnd(),0.004f*rnd()); for(auto&s:b.sc)s=rand(); for(auto&q:b.qs)q=rand(); }
  std::vector<bq8> hy((size_t)CM*nb*8); for(auto&b:hy){ b.ds=__floats2half2_rn(0.01f*rnd()+0.001f,0); for(auto&q:b.qs)q=rand()%255-127; }
  for(int i=0;i<nb*8;i++){ hy[(size_t)3*nb*8+i].ds=__floats2half2_rn(0,0); for(auto&q:hy[(size_t)3*nb*8+i].qs)q=0; } // a column of zeros
  for(int i=0;i<nb;i++) hx[(size_t)5*nb+i].dm=__floats2half2_rn(-0.001f,-0.f);                                       // a row of negative scales: zeros of both signs
  bq4*x; bq8*y; float*d1,*d2; char*P; size_t xs=hx.size()*sizeof(bq4); CK(cudaMalloc(&x,xs*nm)); for(int i=0;i<nm;i++)CK(cudaMemcpy((char*)x+xs*i,hx.data(),xs,cudaMemcpyHostToDevice));
  CK(cudaMalloc(&y,hy.size()*sizeof(bq8)));CK(cudaMemcpy(y,hy.data(),hy.size()*sizeof(bq8),cudaMemcpyHostToDevice));CK(cudaMalloc(&d1,4*(size_t)N*16));CK(cudaMalloc(&d2,4*(size_t)N*16));CK(cudaMalloc(&P,(size_t)nb*8*CHK+256));
  cudaEvent_t e0,e1; cudaEventCreate(&e0);cudaEventCreate(&e1); dim3 b4(32,4);
  for(int c=0;c<CM;c++) ref<1,4,1><<<N,b4>>>(x,y+(size_t)c*nb*8,d1+(size_t)c*N,nb,N); CK(cudaDeviceSynchronize());
  std::vector<float> h1((size_t)CM*N),h2((size_t)CM*N); CK(cudaMemcpy(h1.data(),d1,4*h1.size(),cudaMemcpyDeviceToHost));
  auto check=[&](int cols){ CK(cudaMemcpy(h2.data(),d2,4*h2.size(),cudaMemcpyDeviceToHost)); size_t bad=0; for(size_t i=0;i<(size_t)cols*N;i++) bad+=(*(uint32_t*)&h1[i]!=*(uint32_t*)&h2[i]); return bad; };
  auto timeit=[&](auto f,const char*n,int cols){ if(only){ f(x); CK(cudaDeviceSynchronize()); return; } CK(cudaMemset(d2,0xff,4*(size_t)N*16)); f(x); cudaError_t err=cudaDeviceSynchronize(); if(err){printf("%-30s %s\n",n,cudaGetErrorString(err));exit(1);} size_t bad=check(cols); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); CK(cudaDeviceSynchronize()); std::vector<float> ts; for(int rep=0;rep<9;rep++){ cudaEventRecord(e0); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); cudaEventRecord(e1); cudaEventSynchronize(e1); float ms; cudaEventElapsedTime(&ms,e0,e1); ts.push_back(ms/nm*1000); } std::sort(ts.begin(),ts.end()); CK(cudaGetLastError()); printf("%-30s cols %2d  %8.2f us  %6.0f GB/s  differing %zu of %zu\n",n,cols,ts[4],xs/ts[4]/1e3,bad,(size_t)cols*N); fflush(stdout); };
  printf("K=%d N=%d matrix %.1f MB x %d\n",K,N,xs/1e6,nm);
  timeit([&](bq4*p){ref<1,4,1><<<N,b4>>>(p,y,d2,nb,N);},"one column (stock geometry)",1);
  timeit([&](bq4*p){ref<8,4,2><<<N/2,b4>>>(p,y,d2,nb,N);},"generic exact 8",8);
#define F(NT,HF,G,D,CC) { size_t sz=smem<NT,HF,G,D>(nb); if(sz<=232448){ auto k=tensor<NT,HF,G,D>; CK(cudaFuncSetAttribute(k,cudaFuncAttributeMaxDynamicSharedMemorySize,(int)sz)); pack<NT><<<nb*NT,128>>>(y,P,nb,CC); int grid=std::min(SM,(N+15)/16); timeit([&](bq4*p){k<<<grid,128*G,sz>>>(p,P,d2,nb,N,CC,0x64006400u);},"tensor C=" #CC " NT=" #NT " HALF=" #HF " G=" #G " D=" #D,CC);} }
#ifdef VARIANTS_INC
#include VARIANTS_INC
#else
F(1,false,4,4,8) F(2,true,3,4,9) F(2,true,3,4,12) F(2,false,3,4,16) F(2,false,3,6,16) F(2,false,4,4,16) F(2,false,2,4,16)
#endif
  return 0; }
