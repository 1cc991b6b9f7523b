// A micro-benchmark of an idea that lost: an exact Q4_K mat-vec over up to 16 columns on tensor cores (NVIDIA, sm_80 or newer).
// Same additions in the same order as the one-column kernel; only the integer dot products, which are exact, move to the
// tensor cores. Every variant is compared with the one-column kernel bit for bit, then timed. See docs/price.md.
// Build: nvcc -O3 -std=c++17 -use_fast_math -gencode=arch=compute_90,code=sm_90 -o q4k_mma q4k_mma.cu
// Run:   ./q4k_mma [K] [rows] [matrices]     Output on an H200: data/compiled/q4k_mma-h200.txt
#include "q4k_half.cuh"
// ---- the candidate
// Packed columns, for a block of 256 values, an n tile of 8 columns and a group j of 4 slots (64 values): 832 bytes (1344 with
// halves): B: per lane (column g, quarter t) 4 slots of {slice 0: 2 values, slice 1: 2 values}; e[slot][column]{slice 0, 1}; d[column]{0, 1}.
template<bool BH> constexpr int CH=(BH?1024:512)+256+64;
template<bool BH> __host__ __device__ constexpr int chunk(){ return (BH?1024:512)+256+64; }
template<bool BH> __global__ void pack(const bq8*y,char*P,int nb,int nt,int C){
  // a thread for each (block, n tile, j, slot, column)
  int i=blockIdx.x*blockDim.x+threadIdx.x; int n=i&7,sl=(i>>3)&3,j=(i>>5)&3; int r=i>>7; int tile=r%nt,b=r/nt; if(b>=nb)return;
  int c=tile*8+n; const bq8*yy=y+(size_t)(c<C?c:0)*nb*8+b*8+2*j;
  char*p=P+((size_t)(b*nt+tile)*4+j)*chunk<BH>(); float d[2],e[2];
  for(int k=0;k<2;k++){ d[k]=__low2float(yy[k].ds); int s=0; for(int q=0;q<4;q++) s+=yy[k].qs[4*sl+q]+yy[k].qs[16+4*sl+q]; e[k]=d[k]*(float)s; }
  for(int t=0;t<4;t++){ int o=(t>>1)*16+4*sl+2*(t&1);
    if(BH){ half*h=(half*)(p+(sl>>1)*512+(n*4+t)*16+(sl&1)*8); for(int k=0;k<2;k++){ h[2*k]=__int2half_rn(yy[k].qs[o]);h[2*k+1]=__int2half_rn(yy[k].qs[o+1]); } }
    else { uint8_t*u=(uint8_t*)(p+(n*4+t)*16+sl*4); for(int k=0;k<2;k++){ u[2*k]=yy[k].qs[o]+128;u[2*k+1]=yy[k].qs[o+1]+128; } } }
  char*q=p+(BH?1024:512); ((float2*)q)[sl*8+n]=make_float2(e[0],e[1]); if(sl==0)((float2*)(q+256))[n]=make_float2(d[0],d[1]);
}
__device__ __forceinline__ void waitg(int n){ switch(n){ case 0: asm volatile("cp.async.wait_group 0;"); break; case 1: asm volatile("cp.async.wait_group 1;"); break; case 2: asm volatile("cp.async.wait_group 2;"); break;
  case 3: asm volatile("cp.async.wait_group 3;"); break; case 4: asm volatile("cp.async.wait_group 4;"); break; case 5: asm volatile("cp.async.wait_group 5;"); break; case 6: asm volatile("cp.async.wait_group 6;"); break; default: asm volatile("cp.async.wait_group 7;"); } }
// NT: n tiles of 8 columns; W: warps a block; four warps (one for each j) make a tile of 16 rows and share a ring of D stages, each one
// block of 256 weights of those rows.
template<int NT,int W,int D,bool BH> __launch_bounds__(32*W,1) __global__ void mma(const bq4*__restrict__ x,const char*__restrict__ P,float*__restrict__ dst,int nb,int nrows,int ncols,unsigned K64){
  extern __shared__ __align__(16) char sm[];
  const int lane=threadIdx.x&31,warp=threadIdx.x>>5,j=warp&3,grp=warp>>2,g=lane>>2,t=lane&3; constexpr int G=W/4,CHK=chunk<BH>(),RB=4*CHK*NT,ST=16*144;
  const int q=threadIdx.x&127;
  const unsigned cols=(unsigned)nb*RB; float*scr=(float*)(sm+cols)+grp*(4*NT*16*32);
  const unsigned ring=cols+W*NT*2048+grp*(D*ST);
  const int ntiles=(nrows+15)/16; const unsigned rs=nb*144u; const unsigned s0=(unsigned)__cvta_generic_to_shared(sm);
  for(unsigned k=threadIdx.x*16;k<cols;k+=32*W*16) cpa(s0+k,P+k);
  commit();
  auto keep=[&](unsigned v){ return __shfl_sync(~0u,v,lane); }; // the compiler would otherwise compute it again in each step
  const unsigned psel=keep((t&1)?0x4342u:0x4140u), wofs=keep(ring+g*144u), qofs=keep(ring+g*144u+16u+32u*j+16u*(t>>1));
  const unsigned bofs=keep(j*CHK+16*lane), eofs=keep(j*CHK+(BH?1024:512)+16*t);
  const unsigned o=keep((j&1)*2u), selc0=keep(0x4040u|o|(o<<8)), selc1=keep(0x4141u|o|(o<<8)), selm0=keep(0x7650u|o), selm1=keep(0x7651u|o), high=keep(j>>1);
  const unsigned dst0=s0+ring+q*16;
  bool first=true;
  for(int rnd=0;;rnd++){
    const int tile=(rnd*G+grp)*gridDim.x+blockIdx.x; const bool act=tile<ntiles;
    if(!act){ if(first){ waitg(0); __syncthreads(); } break; }
    const char*g0=(const char*)x+(size_t)min(tile*16+q/9,nrows-1)*rs+16*(q%9); const char*g1=(const char*)x+(size_t)min(tile*16+(128+(q&15))/9,nrows-1)*rs+16*((128+(q&15))%9);
    float T[NT][4][4],S[NT][4][4];
    auto each=[&](auto f){
#pragma unroll
      for(int n=0;n<NT;n++)
#pragma unroll
        for(int sl=0;sl<4;sl++)
#pragma unroll
          for(int p=0;p<4;p++) f(n,sl,p); };
    each([&](int n,int sl,int p){T[n][sl][p]=0;S[n][sl][p]=-0.f;}); // -0 + t is t in every bit
    auto next=[&](int b){ int c=b+8; if(c>=nb){ c=(b&7)+2; if(c>=8) c=(b&1)?nb:1; } return c; };
    int bl=0; unsigned sl_=0;
    auto load=[&](){ if(bl<nb){ cpa(dst0+sl_,g0+bl*144u); if(q<16) cpa(dst0+2048+sl_,g1+bl*144u); bl=next(bl); } commit(); sl_+=ST; if(sl_==D*ST) sl_=0; };
#pragma unroll
    for(int k=0;k<D-1;k++) load();
    if(first){ waitg(D-1); __syncthreads(); first=false; }
    unsigned sr=0;
    for(int b=0;b<nb;b=next(b)){
      waitg(D-2); asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
      load();
      const uint4 H0=*(const uint4*)(sm+wofs+sr),H1=*(const uint4*)(sm+wofs+sr+8*144),V0=*(const uint4*)(sm+qofs+sr),V1=*(const uint4*)(sm+qofs+sr+8*144);
      sr+=ST; if(sr==D*ST) sr=0;
      unsigned c0[2],n0[2],c1[2],n1[2]; float m0[2],m1[2],dx[2],dy[2];
#pragma unroll
      for(int r=0;r<2;r++){ const uint4 h=r?H1:H0; unsigned sw,mw;
        if(!high){ sw=h.y&0x3f3f3f3fu; mw=h.z&0x3f3f3f3fu; } else { sw=(h.w&0x0f0f0f0fu)|((h.y>>2)&0x30303030u); mw=((h.w>>4)&0x0f0f0f0fu)|((h.z>>2)&0x30303030u); }
        c0[r]=h2add(__byte_perm(sw,0x64646464u,selc0),H_1024N);
        c1[r]=h2fma(__byte_perm(sw,0x64646464u,selc1),H_16TH,H_64N);
        n0[r]=h2mul(c0[r],H_1024N); n1[r]=h2mul(c1[r],H_1024N);
        m0[r]=b2f(mw,selm0); m1[r]=b2f(mw,selm1); float2 f=__half22float2(*(const half2*)&h.x); dx[r]=f.x;dy[r]=f.y; }
      const char*cb=sm+b*(unsigned)RB; float4 Dd[NT]; uint4 Bq[NT][BH?2:1];
#pragma unroll
      for(int n=0;n<NT;n++){ Bq[n][0]=*(const uint4*)(cb+bofs+n*4*CHK); if(BH) Bq[n][BH?1:0]=*(const uint4*)(cb+bofs+n*4*CHK+512); Dd[n]=*(const float4*)(cb+eofs+n*4*CHK+256); }
#pragma unroll
      for(int sl=0;sl<4;sl++){ unsigned a[2],c[2];
#pragma unroll
        for(int r=0;r<2;r++){ const uint4 V=r?V1:V0; const unsigned v=sl==0?V.x:sl==1?V.y:sl==2?V.z:V.w; const unsigned w=__byte_perm(v,0,psel);
          a[r]=h2fma((w&0x000F000Fu)|K64,c0[r],n0[r]); c[r]=h2fma((w&0x00F000F0u)|K64,c1[r],n1[r]); }
#pragma unroll
        for(int n=0;n<NT;n++){ unsigned b0,b1;
          if constexpr(BH){ const uint4 z=Bq[n][sl>>1]; b0=(sl&1)?z.z:z.x; b1=(sl&1)?z.w:z.y; }
          else { const uint4 z=Bq[n][0]; const unsigned u=sl==0?z.x:sl==1?z.y:sl==2?z.z:z.w; b0=h2add(__byte_perm(u,0x64646464u,0x4140u),H_1152N); b1=h2add(__byte_perm(u,0x64646464u,0x4342u),H_1152N); }
          float p0[4],p1[4]; mma8(p0,a[0],a[1],b0); mma8(p1,c[0],c[1],b1);
          const float4 E=*(const float4*)(cb+eofs+n*4*CHK+sl*64);
#pragma unroll
          for(int p=0;p<4;p++){ const int r=p>>1; const float d0=(p&1)?Dd[n].z:Dd[n].x,d1=(p&1)?Dd[n].w:Dd[n].y,e0=(p&1)?E.z:E.x,e1=(p&1)?E.w:E.y;
            const float sd=__fmaf_rn(d1,p1[p],__fmul_rn(d0,p0[p])), sq=__fmaf_rn(e1,m1[r],__fmul_rn(e0,m0[r]));
            T[n][sl][p]=__fadd_rn(T[n][sl][p],__fmaf_rn(dx[r],sd,-__fmul_rn(dy[r],sq))); } } }
      if(b+8>=nb){ // the sums of a warp of the one-column kernel are complete: add them to those of the warps before it
        each([&](int n,int sl,int p){ S[n][sl][p]=__fadd_rn(S[n][sl][p],T[n][sl][p]); T[n][sl][p]=0; });
        if((b&7)==6) each([&](int n,int sl,int p){ scr[((j*NT+n)*16+sl*4+p)*32+lane]=S[n][sl][p]; S[n][sl][p]=-0.f; }); // the lower half warp's
      }
    }
    each([&](int n,int sl,int p){ float*z=scr+((j*NT+n)*16+sl*4+p)*32+lane; *z=__fadd_rn(*z,S[n][sl][p]); });
    asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
#pragma unroll
    for(int n=0;n<NT;n++){ float Y[4];
#pragma unroll
      for(int sl=0;sl<4;sl++){ const float*z=scr+(n*16+sl*4+j)*32+lane; constexpr int js=NT*16*32; Y[sl]=__fadd_rn(__fadd_rn(z[0],z[2*js]),__fadd_rn(z[js],z[3*js])); }
      const int row=tile*16+g+8*(j>>1),col=n*8+2*t+(j&1); if(row<nrows&&col<ncols) dst[(size_t)col*nrows+row]=__fadd_rn(__fadd_rn(Y[0],Y[2]),__fadd_rn(Y[1],Y[3])); }
    asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
  }
}
template<int NT,int W,int D,bool BH> size_t smem(int nb){ return (size_t)nb*4*chunk<BH>()*NT+(size_t)W*NT*16*32*4+(size_t)W/4*D*2304; }
static float rnd(){return rand()/(float)RAND_MAX;}
int main(int argc,char**argv){
  int K=argc>1?atoi(argv[1]):4096,N=argc>2?atoi(argv[2]):12288,nm=argc>3?atoi(argv[3]):24; int nb=K/256; const int CM=16; const char*only=argc>4?argv[4]:nullptr;
  cudaDeviceProp pr; CK(cudaGetDeviceProperties(&pr,0)); const int SM=pr.multiProcessorCount;
  std::vector<bq4> hx((size_t)N*nb); srand(1); for(auto&b:hx){ b.dm=__floats2half2_rn(0.0005f+0.001f*rnd(),0.004f*rnd()); for(auto&s:b.sc)s=rand(); for(auto&q:b.qs)q=rand(); }
  std::vector<bq8> hy((size_t)CM*nb*8); for(auto&b:hy){ b.ds=__floats2half2_rn(0.01f*rnd()+0.001f,0); for(auto&q:b.qs)q=rand()%255-127; }
  bq4*x; bq8*y; float*d1,*d2; char*P; size_t xs=hx.size()*sizeof(bq4); CK(cudaMalloc(&x,xs*nm)); for(int i=0;i<nm;i++)CK(cudaMemcpy((char*)x+xs*i,hx.data(),xs,cudaMemcpyHostToDevice));
  CK(cudaMalloc(&y,hy.size()*sizeof(bq8)));CK(cudaMemcpy(y,hy.data(),hy.size()*sizeof(bq8),cudaMemcpyHostToDevice));CK(cudaMalloc(&d1,4*(size_t)N*16));CK(cudaMalloc(&d2,4*(size_t)N*16));CK(cudaMalloc(&P,(size_t)nb*8*1344+256));
  cudaEvent_t e0,e1; cudaEventCreate(&e0);cudaEventCreate(&e1); dim3 b4(32,4);
  for(int c=0;c<CM;c++) ref<1,4,1><<<N,b4>>>(x,y+(size_t)c*nb*8,d1+(size_t)c*N,nb,N); CK(cudaDeviceSynchronize());
  std::vector<float> h1((size_t)CM*N),h2((size_t)CM*N); CK(cudaMemcpy(h1.data(),d1,4*h1.size(),cudaMemcpyDeviceToHost));
  auto check=[&](int cols){ CK(cudaMemcpy(h2.data(),d2,4*h2.size(),cudaMemcpyDeviceToHost)); size_t bad=0; for(size_t i=0;i<(size_t)cols*N;i++) bad+=(*(uint32_t*)&h1[i]!=*(uint32_t*)&h2[i]); return bad; };
  auto timeit=[&](auto f,const char*n,int cols){ if(only){ f(x); CK(cudaDeviceSynchronize()); return; } CK(cudaMemset(d2,0xff,4*(size_t)N*16)); f(x); cudaError_t err=cudaDeviceSynchronize(); if(err){printf("%-30s %s\n",n,cudaGetErrorString(err));exit(1);} size_t bad=check(cols); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); CK(cudaDeviceSynchronize()); std::vector<float> ts; for(int rep=0;rep<9;rep++){ cudaEventRecord(e0); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); cudaEventRecord(e1); cudaEventSynchronize(e1); float ms; cudaEventElapsedTime(&ms,e0,e1); ts.push_back(ms/nm*1000); } std::sort(ts.begin(),ts.end()); CK(cudaGetLastError()); printf("%-30s cols %2d  %8.2f us  %6.0f GB/s  differing %zu of %zu\n",n,cols,ts[4],xs/ts[4]/1e3,bad,(size_t)cols*N); fflush(stdout); };
  printf("K=%d N=%d matrix %.1f MB x %d\n",K,N,xs/1e6,nm);
  timeit([&](bq4*p){ref<1,4,1><<<N,b4>>>(p,y,d2,nb,N);},"one column (stock geometry)",1);
  timeit([&](bq4*p){ref<8,4,2><<<N/2,b4>>>(p,y,d2,nb,N);},"generic exact 8",8);
#define F(NT,WW,NB,BH,CC) { size_t sz=smem<NT,WW,NB,BH>(nb); if(sz<=232448){ auto k=mma<NT,WW,NB,BH>; CK(cudaFuncSetAttribute(k,cudaFuncAttributeMaxDynamicSharedMemorySize,(int)sz)); pack<BH><<<nb*NT,128>>>(y,P,nb,NT,CC); int grid=std::min(SM,(N+15)/16); timeit([&](bq4*p){k<<<grid,32*WW,sz>>>(p,P,d2,nb,N,CC,0x64006400u);},"mma C=" #CC " NT=" #NT " W=" #WW " D=" #NB " BH=" #BH,CC);} }
F(1,16,6,false,8) F(1,12,6,false,8) F(1,12,8,false,8) F(1,8,8,false,8) F(1,16,6,true,8) F(1,12,8,true,8) F(1,8,8,true,8)
F(2,8,8,false,16) F(2,12,6,false,16) F(2,12,8,false,16) F(2,8,8,true,16) F(2,12,8,false,9) F(1,16,3,false,8) F(1,12,3,false,8) F(1,8,3,false,8)
  return 0; }
