// A micro-benchmark of one idea, not part of the patches: an exact Q4_K mat-vec over several columns at once (NVIDIA, sm_80 or
// newer). Same additions in the same order as the one-column kernel, other instructions: what docs/price.md describes.
// Every variant is compared with the one-column kernel bit for bit, then timed. Dense on purpose: it is meant to be tried and
// thrown away. With three rows a tile the last row is left out where the rows are no multiple of three; its count shows it.
// Build: nvcc -O3 -std=c++17 -use_fast_math -gencode=arch=compute_90,code=sm_90 -o q4k_fast q4k_fast.cu
// Run:   ./q4k_fast [K] [rows] [matrices]     Output on an H200: data/compiled/q4k_fast-h200.txt
#include "q4k_packed.cuh"
// C columns, R rows a tile, NW warps a tile (1: a warp plays stock's four warps in turn; 4: one each), W warps a block.
template<int C,int R,int NW,int W> __launch_bounds__(32*W,1) __global__ void fast(const bq4*__restrict__ x,const char*__restrict__ P,float*__restrict__ dst,int nb,int nrows){
  extern __shared__ __align__(16) char sm[];
  const int lane=threadIdx.x&31,warp=threadIdx.x>>5,slot=lane&15,hi=lane>>4,j=slot>>2; constexpr int RC=rec(C);
  const int np=nb/2, w0=NW==4?(warp&3):0, grp=NW==4?warp>>2:warp; constexpr int G=NW==4?W/4:W;
  char*dec=sm+(size_t)nb*RC+warp*(R*256*2); // two buffers of [2 blocks][R rows][4 j][32 bytes]
  float*red=(float*)(sm+(size_t)nb*RC+W*(R*256*2));
  const int ntiles=nrows/R; const unsigned rs=nb*144u;
  // visiting order: NW==1: for w: for i: pair 4i+w; NW==4: own w
  // stage the columns, four groups
  const unsigned s0_=(unsigned)__cvta_generic_to_shared(sm);
  { const int per=2*RC/16; // 16-byte pieces in a pair
    for(int g=0;g<4;g++){ int n=(np-g+3)/4; // NW==1: pairs g, g+4, ...; NW==4: a quarter of the i range
      if(NW==1){ for(int q=threadIdx.x;q<n*per;q+=32*W){ int i=q/per,o=q-i*per; size_t off=(size_t)(4*i+g)*2*RC+16*o; cpa(s0_+off,P+off);} }
      else { int a=(np*g/4/4)*4,b=g==3?np:(np*(g+1)/4/4)*4; for(int q=threadIdx.x;q<(b-a)*per;q+=32*W){ size_t off=(size_t)a*2*RC+16*q; cpa(s0_+off,P+off);} }
      COMMIT(); } }
  const unsigned qo=16+32*j+4*(slot&3); const int dr=lane>>3,db=(lane>>2)&1,dj=lane&3; // decode job: row, block, j (R=4; others loop)
  constexpr int JOBS=(R*8+31)/32;
  bool firsttile=true;
  for(int rnd=0;;rnd++){
    int tile=(rnd*G+grp)*gridDim.x+blockIdx.x; bool act=tile<ntiles;
    if(!firsttile){ if(!act) break; } // later tiles need no barrier among tiles
    const char*xb=(const char*)x+(size_t)(act?tile:0)*R*rs;
    float t[R*C],s[NW==1?R*C:1];
#pragma unroll
    for(int i=0;i<R*C;i++) t[i]=0;
    uint4 h[JOBS]; int v0[R],v1[R];
    auto fetch=[&](int p){ // pair p
      const char*b=xb+p*288u;
#pragma unroll
      for(int q=0;q<JOBS;q++){ int r=dr+4*q; if(R>=4*(q+1)||r<R) h[q]=*(const uint4*)(b+r*rs+db*144u); }
#pragma unroll
      for(int r=0;r<R;r++){ const char*z=b+r*rs+hi*144u+qo; v0[r]=*(const int*)z; v1[r]=*(const int*)(z+16);} };
    auto decode=[&](int buf){
#pragma unroll
      for(int q=0;q<JOBS;q++){ int r=dr+4*q; if(R>=4*(q+1)||r<R){ const uint4 H=h[q];
        unsigned sw=dj<2?(H.y&0x3f3f3f3fu):((H.w&0x0f0f0f0fu)|((H.y>>2)&0x30303030u));
        unsigned mw=dj<2?(H.z&0x3f3f3f3fu):(((H.w>>4)&0x0f0f0f0fu)|((H.z>>2)&0x30303030u));
        unsigned b=(dj&1)*2; float a0=b2f(sw,0x7650|b),a1=b2f(sw,0x7650|(b+1))*0.0625f,m0=b2f(mw,0x7650|b),m1=b2f(mw,0x7650|(b+1));
        float2 f=__half22float2(*(half2*)&H.x);
        float4*o=(float4*)(dec+buf*(R*256)+((db*R+r)*4+dj)*32); o[0]=make_float4(a0,a1,-MG*a0,-MG*a1); o[1]=make_float4(m0,m1,f.x,f.y); } } };
    int w=w0,i=0,p=w0; bool more=act&&p<np; if(more) fetch(p);
    int buf=0; int gdone=firsttile?0:4; 
    if(firsttile&&NW==1){ waitg<3>(); __syncthreads(); gdone=1; }
    if(firsttile&&NW==4){ waitg<3>(); __syncthreads(); gdone=1; }
    const int nvis=NW==1?np:(np-w0+3)/4; const int nmax=NW==1?np:(np+3)/4;
    for(int vis=0;vis<nmax;vis++){
      if(firsttile){ // entering a new group of staged columns?
        int need= NW==1 ? w+1 : 0;
        if(NW==4){ int pp=4*i; need=pp<(np*1/4/4)*4?1:pp<(np*2/4/4)*4?2:pp<(np*3/4/4)*4?3:4; }
        while(gdone<need){ gdone++; if(gdone==2)waitg<2>(); else if(gdone==3)waitg<1>(); else waitg<0>(); __syncthreads(); }
      }
      if(more&&(NW==1||vis<nvis)){
        decode(buf); unsigned a0[R],a1[R],b0[R],b1[R];
#pragma unroll
        for(int r=0;r<R;r++){ a0[r]=v0[r]&0x0F0F0F0Fu;a1[r]=v0[r]&0xF0F0F0F0u;b0[r]=v1[r]&0x0F0F0F0Fu;b1[r]=v1[r]&0xF0F0F0F0u; }
        const int pc=p; int wn=w,in=i+1,pn=p+4; if(NW==1&&pn>=np){ wn=w+1;in=0;pn=wn; }
        const bool nx=NW==1?wn<4&&pn<np:pn<np; if(nx) fetch(pn);
        __syncwarp();
        float4 A[R],B[R];
#pragma unroll
        for(int r=0;r<R;r++){ const float4*o=(const float4*)(dec+buf*(R*256)+((hi*R+r)*4+j)*32); A[r]=o[0];B[r]=o[1]; }
        const char*cb=sm+(size_t)(2*pc+hi)*RC; const int4*U=(const int4*)cb+slot; const float2*E=(const float2*)(cb+256*C)+slot; const float2*D=(const float2*)(cb+384*C)+j;
#pragma unroll
        for(int c=0;c<C;c++){ const int4 u=U[c*16]; const float2 e=E[c*16],d=D[c*4];
#pragma unroll
          for(int r=0;r<R;r++){
            float x0=__int_as_float(dp4us(b0[r],u.y,dp4us(a0[r],u.x,MI))), x1=__int_as_float(dp4us(b1[r],u.w,dp4us(a1[r],u.z,MI)));
            float p0=__fmaf_rn(x0,A[r].x,A[r].z), p1=__fmaf_rn(x1,A[r].y,A[r].w);
            float sd=__fmaf_rn(d.y,p1,__fmul_rn(d.x,p0)), sq=__fmaf_rn(e.y,B[r].y,__fmul_rn(e.x,B[r].x));
            t[r*C+c]=__fadd_rn(t[r*C+c],__fmaf_rn(B[r].z,sd,-__fmul_rn(B[r].w,sq))); } }
        buf^=1; 
        if(NW==1&&wn!=w){ // stock's next warp: its partial sums are added to those of the warps before it
#pragma unroll
          for(int k=0;k<R*C;k++){ s[NW==1?k:0]= w==0? t[k] : __fadd_rn(s[NW==1?k:0],t[k]); t[k]=0; } }
        w=wn;i=in;p=pn;more=nx;
      } else { i++; if(NW==1){ p+=4; if(p>=np){w++;p=w;i=0;} } }
    }
    if(NW==1){ if(act) fold_all<R*C,0>(s,lane,[&](int k,float v){ dst[(size_t)(k%C)*nrows+tile*R+k/C]=v; }); }
    else { // four warps of a tile meet
      float*rg=red+grp*(R*C*4*32);
#pragma unroll
      for(int k=0;k<R*C;k++) rg[(k*4+w0)*32+lane]=t[k];
      asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
      constexpr int V=R*C,Q=(V+3)/4,QP=Q<=1?1:Q<=2?2:Q<=4?4:Q<=8?8:Q<=16?16:32; float v[QP];
#pragma unroll
      for(int k=0;k<QP;k++){ int q=w0*Q+k; if(k<Q&&q<V){ const float*z=rg+q*4*32+lane; float y=z[0]; y=__fadd_rn(y,z[32]); y=__fadd_rn(y,z[64]); y=__fadd_rn(y,z[96]); v[k]=y; } else v[k]=0; }
      int keep;bool first; float y=fold<QP>(v,lane,keep,first); int q=w0*Q+keep;
      if(act&&first&&keep<Q&&q<V) dst[(size_t)(q%C)*nrows+tile*R+q/C]=y;
      asm volatile("bar.sync %0,128;"::"r"(1+grp):"memory");
    }
    if(firsttile){ firsttile=false; }
  }
}
template<int C,int R,int NW,int W> size_t smem(int nb){ return (size_t)nb*rec(C)+W*(R*256*2)+(NW==4?(size_t)(W/4)*R*C*4*32*4:0); }
static float rnd(){return rand()/(float)RAND_MAX;}
int main(int argc,char**argv){
  int K=argc>1?atoi(argv[1]):4096,N=argc>2?atoi(argv[2]):12288,nm=argc>3?atoi(argv[3]):24; int nb=K/256; const int CM=16;
  cudaDeviceProp pr; CK(cudaGetDeviceProperties(&pr,0)); const int SM=pr.multiProcessorCount;
  std::vector<bq4> hx((size_t)N*nb); srand(1); for(auto&b:hx){ b.dm=__floats2half2_rn(0.0005f+0.001f*rnd(),0.004f*rnd()); for(auto&s:b.sc)s=rand(); for(auto&q:b.qs)q=rand(); }
  std::vector<bq8> hy((size_t)CM*nb*8); for(auto&b:hy){ b.ds=__floats2half2_rn(0.01f*rnd()+0.001f,0); for(auto&q:b.qs)q=rand()%255-127; }
  bq4*x; bq8*y; float*d1,*d2; char*P; size_t xs=hx.size()*sizeof(bq4); CK(cudaMalloc(&x,xs*nm)); for(int i=0;i<nm;i++)CK(cudaMemcpy((char*)x+xs*i,hx.data(),xs,cudaMemcpyHostToDevice));
  CK(cudaMalloc(&y,hy.size()*sizeof(bq8)));CK(cudaMemcpy(y,hy.data(),hy.size()*sizeof(bq8),cudaMemcpyHostToDevice));CK(cudaMalloc(&d1,4*(size_t)N*16));CK(cudaMalloc(&d2,4*(size_t)N*16));CK(cudaMalloc(&P,(size_t)nb*rec(16)+256));
  cudaEvent_t e0,e1; cudaEventCreate(&e0);cudaEventCreate(&e1); dim3 b4(32,4),b2(32,2);
  for(int c=0;c<CM;c++) ref<1,4,1><<<N,b4>>>(x,y+(size_t)c*nb*8,d1+(size_t)c*N,nb,N); CK(cudaDeviceSynchronize());
  std::vector<float> h1((size_t)CM*N),h2((size_t)CM*N); CK(cudaMemcpy(h1.data(),d1,4*h1.size(),cudaMemcpyDeviceToHost));
  auto check=[&](int cols){ CK(cudaMemcpy(h2.data(),d2,4*h2.size(),cudaMemcpyDeviceToHost)); size_t bad=0; for(size_t i=0;i<(size_t)cols*N;i++) bad+=(*(uint32_t*)&h1[i]!=*(uint32_t*)&h2[i]); return bad; };
  auto timeit=[&](auto f,const char*n,int cols){ CK(cudaMemset(d2,0xff,4*(size_t)N*16)); f(x); cudaError_t err=cudaDeviceSynchronize(); if(err){printf("%-30s %s\n",n,cudaGetErrorString(err));exit(1);} size_t bad=check(cols); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); CK(cudaDeviceSynchronize()); std::vector<float> ts; for(int rep=0;rep<9;rep++){ cudaEventRecord(e0); for(int i=0;i<nm;i++)f((bq4*)((char*)x+xs*i)); cudaEventRecord(e1); cudaEventSynchronize(e1); float ms; cudaEventElapsedTime(&ms,e0,e1); ts.push_back(ms/nm*1000); } std::sort(ts.begin(),ts.end()); CK(cudaGetLastError()); printf("%-30s cols %2d  %8.2f us  %6.0f GB/s  differing %zu of %zu\n",n,cols,ts[4],xs/ts[4]/1e3,bad,(size_t)cols*N); fflush(stdout); };
  printf("K=%d N=%d matrix %.1f MB x %d\n",K,N,xs/1e6,nm);
  timeit([&](bq4*p){ref<1,4,1><<<N,b4>>>(p,y,d2,nb,N);},"one column (stock geometry)",1);
  timeit([&](bq4*p){ref<8,2,2><<<N/2,b2>>>(p,y,d2,nb,N);},"stock 8: 2 warps x2 rows",8);
  timeit([&](bq4*p){ref<8,4,2><<<N/2,b4>>>(p,y,d2,nb,N);},"generic exact 8",8);
#define F(CC,RR,NN,WW) { size_t sz=smem<CC,RR,NN,WW>(nb); if(sz<=232448){ CK(cudaFuncSetAttribute(fast<CC,RR,NN,WW>,cudaFuncAttributeMaxDynamicSharedMemorySize,(int)sz)); pack<CC><<<(nb*CC*16+127)/128,128>>>(y,P,nb); int tiles=N/RR,g=NN==4?WW/4:WW,grid=std::min(SM,(tiles+g-1)/g); grid=std::min(tiles,SM); timeit([&](bq4*p){fast<CC,RR,NN,WW><<<grid,32*WW,sz>>>(p,P,d2,nb,N);},"fast C=" #CC " R=" #RR " NW=" #NN " W=" #WW,CC);} }
#define FP(CC) timeit([&](bq4*p){pack<CC><<<(nb*CC*16+127)/128,128>>>(y,P,nb);},"pack C=" #CC,CC);
  FP(8)
  F(1,4,1,16) F(1,4,4,16) F(1,8,1,12) F(1,8,4,16) F(2,4,1,16) F(2,4,4,16) F(2,8,4,12) F(3,4,1,16) F(3,4,4,16) F(4,4,1,16) F(4,4,1,12) F(4,4,4,16) F(5,4,1,12) F(5,4,4,16) F(6,4,1,12) F(6,4,4,16) F(8,4,1,12) F(8,4,1,8) F(8,2,1,16) F(8,4,4,12) F(8,4,4,16) F(8,2,4,16) F(8,3,4,16) F(9,4,1,12) F(9,4,1,8) F(9,4,4,12) F(9,4,4,16) F(9,2,4,16) F(9,2,1,16)
  return 0; }
