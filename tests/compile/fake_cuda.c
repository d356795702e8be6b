/* A libcuda that launches nothing: it tells a file what each launch was called with. */
#include "cuda.h"
#include <stdio.h>
#include <string.h>

int sizes[64], count; /* of the kernel's parameters in bytes, as the test says */

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **places, void **extra) {
  printf("grid %u %u %u block %u %u %u shared %u stream %lx function %lx extra %d attributes",
         c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
         c->sharedMemBytes, (long)c->hStream, (long)f, extra != 0);
  for (unsigned i = 0; i < c->numAttrs; i++)
    printf(" %d=%d", c->attrs[i].id, c->attrs[i].value.programmaticStreamSerializationAllowed);
  printf(" parameters");
  for (int i = 0; i < count; i++) {
    unsigned long value = 0;
    memcpy(&value, places[i], sizes[i]);
    printf(" %lx", value);
  }
  printf("\n");
  fflush(stdout);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) {
  return CUDA_ERROR_NOT_FOUND;
}
