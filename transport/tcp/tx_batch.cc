// Replaces payload that may not be sent any more by zeros.
#include "transport/tcp/tx_batch.h"

namespace baton::tcp {
namespace {

char zeros[framed::kMaxPayload];  // never written, so it costs one page

}  // namespace

void TxBatch::blank(size_t begin, size_t end) {
  for (size_t i = std::max(begin, next_); i < end; ++i) iov_[i].iov_base = zeros;
}

}  // namespace baton::tcp
