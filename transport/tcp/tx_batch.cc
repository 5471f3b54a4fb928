// Replaces payload that may not be sent any more by zeros, or by a copy.
#include "transport/tcp/tx_batch.h"

#include <cstring>
#include <new>
#include <utility>

#include "transport/base/copies/fault_guard.h"

namespace baton::tcp {
namespace {

char zeros[framed::kMaxPayload];  // never written, so it costs one page

}  // namespace

void TxBatch::blank(size_t begin, size_t end) {
  for (size_t i = std::max(begin, next_); i < end; ++i) iov_[i].iov_base = zeros;
}

bool TxBatch::copy_rest(size_t begin, size_t end) {
  begin = std::max(begin, next_);
  size_t bytes = 0;
  for (size_t i = begin; i < end; ++i) bytes += iov_[i].iov_len;
  if (bytes == 0) return true;
  std::unique_ptr<char[]> copy(new (std::nothrow) char[bytes]);
  if (copy == nullptr) return false;
  const bool there = base::guarded([this, begin, end, to = copy.get()] {
    char* at = to;
    for (size_t i = begin; i < end; at += iov_[i++].iov_len) {
      std::memcpy(at, iov_[i].iov_base, iov_[i].iov_len);
    }
  });
  if (!there) return false;
  char* at = copy.get();
  for (size_t i = begin; i < end; at += iov_[i++].iov_len) iov_[i].iov_base = at;
  copies_.push_back(std::move(copy));
  return true;
}

}  // namespace baton::tcp
