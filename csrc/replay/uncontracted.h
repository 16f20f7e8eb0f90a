/* From here on products and sums are rounded separately, as in Python: no compiler fuses them
 * into one operation. Included after all other headers. */
#pragma once

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
