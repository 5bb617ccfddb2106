/* What the library was made from; see compiled.py. */

#include "kernels.h"

PENSTOCK_EXPORT const char *const penstock_source_digest = PENSTOCK_SOURCE_DIGEST;
