/* From here on a product and a sum are rounded one after the other, as in Python's figures: no
 * compiler makes one fused operation of them. Included after all other headers. */
#pragma once

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
