/* Passes over rows that others make of what they have just computed, while it is in a core's cache. */
#ifndef XGPT_ROWS_H
#define XGPT_ROWS_H

#include <stdint.h>

namespace xgpt {

/* out [rows, inner] = silu(gate) * up in bfloat16, as xgpt_silu_mul does it, of rows `stride` elements
 * apart in joint, each one's up `up` elements behind its gate; out's are `out_stride` apart. */
void gate_tile(uint16_t *out, int64_t out_stride, const uint16_t *joint, int64_t stride, int64_t up,
               int64_t rows, int64_t inner);

}  // namespace xgpt
#endif
