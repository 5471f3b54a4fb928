// Layouts and the cursor that walks a local and a remote one in lockstep.
#include "transport/layout.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace baton {
namespace {

// Multiplication and addition that stick at SIZE_MAX instead of wrapping.
size_t mul(size_t a, size_t b) {
  size_t out = 0;
  return __builtin_mul_overflow(a, b, &out) ? SIZE_MAX : out;
}
size_t add(size_t a, size_t b) {
  size_t out = 0;
  return __builtin_add_overflow(a, b, &out) ? SIZE_MAX : out;
}

// Four running maxima, so that no comparison waits for the one before it.
uint32_t largest(const uint32_t* values, size_t count) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    a = std::max(a, values[i]);
    b = std::max(b, values[i + 1]);
    c = std::max(c, values[i + 2]);
    d = std::max(d, values[i + 3]);
  }
  for (; i < count; ++i) a = std::max(a, values[i]);
  return std::max(std::max(a, b), std::max(c, d));
}

size_t step_offset(const Dim& dim, size_t step) {
  return (dim.index != nullptr ? dim.index[step] : step) * dim.stride;
}

}  // namespace

Layout Layout::contiguous(size_t offset, size_t bytes) {
  Layout layout;
  layout.offset_ = offset;
  layout.piece_bytes_ = bytes;
  return layout;
}

Layout Layout::paged(size_t offset, absl::Span<const uint32_t> pages, size_t page_stride,
                     size_t page_bytes) {
  Layout layout = contiguous(offset, page_bytes);
  layout.add_outer({pages.size(), page_stride, pages.data()});
  return layout;
}

Layout Layout::strided(size_t offset, size_t count, size_t stride, size_t row_bytes) {
  Layout layout = contiguous(offset, row_bytes);
  layout.add_outer({count, stride});
  return layout;
}

Layout Layout::box(size_t offset, absl::Span<const Dim> dims, size_t piece_bytes) {
  Layout layout = contiguous(offset, piece_bytes);
  for (size_t i = dims.size(); i-- > 0;) layout.add_outer(dims[i]);
  return layout;
}

Layout Layout::repeated(size_t count, size_t stride) const {
  Layout layout = *this;
  layout.add_outer({count, stride});
  return layout;
}

Layout Layout::measured() const {
  Layout layout = *this;
  layout.measured_ = reach();
  return layout;
}

// From offset_ to behind the last byte.
size_t Layout::reach() const {
  size_t end = piece_bytes_;
  for (const Dim& dim : dims()) {
    const size_t last = dim.index != nullptr ? largest(dim.index, dim.count) : dim.count - 1;
    end = add(end, mul(last, dim.stride));
  }
  return end;
}

void Layout::add_outer(Dim dim) {
  measured_ = 0;
  if (dim.count == 1) {  // a single step is only an offset
    offset_ = add(offset_, step_offset(dim, 0));
    return;
  }
  // Steps that follow each other without a gap make the piece longer instead of the walk.
  if (num_dims_ == 0 && dim.index == nullptr && dim.stride == piece_bytes_) {
    piece_bytes_ = mul(piece_bytes_, dim.count);
    return;
  }
  if (num_dims_ == kMaxDims) {
    too_deep_ = true;
    return;
  }
  for (int i = num_dims_; i > 0; --i) dims_[i] = dims_[i - 1];
  dims_[0] = dim;
  ++num_dims_;
}

size_t Layout::box_bytes() const {
  size_t total = piece_bytes_;
  for (const Dim& dim : dims()) total = mul(total, dim.count);
  return total;
}

absl::Status Layout::check_box(size_t region_bytes, const char* side) const {
  if (too_deep_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the %s layout has more than %d dimensions: split the transfer", side, kMaxDims));
  }
  const size_t total = bytes();
  if (total == 0) return absl::OkStatus();
  if (total == SIZE_MAX) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the %s layout describes more than 2^64 bytes", side));
  }
  const size_t end = add(offset_, measured_ != 0 ? measured_ : reach());
  if (end > region_bytes) {
    return absl::OutOfRangeError(absl::StrFormat(
        "the %s layout ends at byte %u, but its region has %u bytes", side, end, region_bytes));
  }
  return absl::OkStatus();
}

LayoutWalker::LayoutWalker(const Layout& layout, size_t start) : layout_(&layout) {
  at_ = layout.offset_;
  if (layout.piece_bytes_ == 0) return;
  in_piece_ = start;
  size_t piece = 0;
  if (start >= layout.piece_bytes_) {  // most transfers are one slice: no division for these
    in_piece_ = start % layout.piece_bytes_;
    piece = start / layout.piece_bytes_;
  }
  for (int d = layout.num_dims_; d-- > 0;) {
    const Dim& dim = layout.dims_[d];
    if (dim.count == 0) return;
    if (piece > 0) {
      step_[d] = piece % dim.count;
      piece /= dim.count;
    }
    at_ += step_offset(dim, step_[d]);
  }
}

void LayoutWalker::advance(size_t bytes) {
  in_piece_ += bytes;
  if (in_piece_ == layout_->piece_bytes_) next_piece();
}

void LayoutWalker::next_piece() {
  in_piece_ = 0;
  for (int d = layout_->num_dims_; d-- > 0;) {
    const Dim& dim = layout_->dims_[d];
    at_ -= step_offset(dim, step_[d]);
    if (++step_[d] < dim.count) {
      at_ += step_offset(dim, step_[d]);
      return;
    }
    step_[d] = 0;
    at_ += step_offset(dim, 0);
  }
}

TransferCursor::TransferCursor(const Layout& local, const Layout& remote, size_t begin, size_t end)
    : local_(local, begin), remote_(remote, begin), position_(begin), end_(end) {}

bool TransferCursor::next(Piece& piece, size_t max_bytes) {
  size_t left = std::min(end_ - position_, max_bytes);
  if (left == 0) return false;
  piece.local_offset = local_.offset();
  piece.remote_offset = remote_.offset();
  piece.bytes = 0;
  while (true) {
    const size_t bytes = std::min({local_.run(), remote_.run(), left});
    piece.bytes += bytes;
    position_ += bytes;
    left -= bytes;
    if (position_ == end_) return true;
    local_.advance(bytes);
    remote_.advance(bytes);
    // Neighbours on both sides are one piece.
    if (left == 0 || local_.offset() != piece.local_offset + piece.bytes ||
        remote_.offset() != piece.remote_offset + piece.bytes) {
      return true;
    }
  }
}

}  // namespace baton
