/* Passes over rows that callers have just computed, while these are in a core's cache. */
#ifndef XGPT_ROWS_H
#define XGPT_ROWS_H

#include <stdint.h>

namespace xgpt {

/* out [rows, inner] = silu(gate) * up in bfloat16, as xgpt_silu_mul. Rows of joint are `stride`
 * elements apart, a row's up `up` elements behind its gate; out's rows are `out_stride` apart. */
void gate_tile(uint16_t *out, int64_t out_stride, const uint16_t *joint, int64_t stride, int64_t up,
               int64_t rows, int64_t inner);

}  // namespace xgpt
#endif
