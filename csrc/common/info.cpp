#include "dlmkern.h"

extern "C" const char* dlmkern_version(void) { return DLMKERN_VERSION; }

extern "C" const char* dlmkern_error_string(int code) {
  if (code <= DLMKERN_ERROR_CUDA) return "a CUDA call failed";
  switch (code) {
    case DLMKERN_OK:
      return "no error";
    case DLMKERN_ERROR_NULL:
      return "a required pointer is NULL";
    case DLMKERN_ERROR_SHAPE:
      return "the shapes or strides are not valid or do not fit together";
    case DLMKERN_ERROR_DTYPE:
      return "a tensor has a dtype that the function does not take";
    case DLMKERN_ERROR_VALUE:
      return "an argument is out of its range";
    case DLMKERN_ERROR_WORKSPACE:
      return "the workspace is missing or too small";
    case DLMKERN_ERROR_UNAVAILABLE:
      return "this build or this machine has no such backend";
    case DLMKERN_ERROR_MEMORY:
      return "scratch memory could not be allocated";
    default:
      return "unknown error code";
  }
}
