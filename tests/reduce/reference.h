// Plain loops that say what collectives/reduce/reduce.h must do.
#pragma once

#include "collectives/reduce/reduce.h"

namespace baton::collectives::reduce::reference {

void reduce(DataType type, ReduceOp op, void* target, const void* a, const void* b, size_t count,
            uint32_t divide_by = 1);
void fold(DataType type, ReduceOp op, void* target, absl::Span<const void* const> sources,
          size_t count, uint32_t divide_by = 1);

}  // namespace baton::collectives::reduce::reference
