// Layouts: where the bytes of a tensor or of a paged KV cache lie inside one region.
//
// A layout is a base offset, a box of up to five (count, stride) dimensions, outermost first, and a
// contiguous piece at the innermost level. A dimension may be indexed: step i then lies at
// index[i] * stride, which is how page lists are written down:
//
//   Layout::contiguous(0, 64 << 20)                       64 MiB in one run
//   Layout::paged(base, pages, 16 << 10, 16 << 10)        the listed 16 KiB pages
//   Layout::paged(base, pages, 16 << 10, 16 << 10)
//       .repeated(layers, layer_stride)                   the same pages in every layer
//
// Pieces may overlap, or be the same (a stride of 0, a page listed twice). Read from, each has the
// bytes. Written to, every byte ends as that of one of the pieces that lie there, and no party says
// of which: pieces of a transfer move in any order.
//
// Building one costs nothing that grows with the number of pages: the list is borrowed, and must
// stay in place until the transfer that uses it has ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace baton {

// One dimension of a box. Step i (0 <= i < count) lies at i * stride bytes, or at
// index[i] * stride where an index list is given.
struct Dim {
  size_t count = 1;
  size_t stride = 0;
  const uint32_t* index = nullptr;  // borrowed, `count` entries
};

class Layout {
 public:
  static constexpr int kMaxDims = 5;

  Layout() = default;  // zero bytes

  // `bytes` bytes in one run, `offset` bytes into the region.
  static Layout contiguous(size_t offset, size_t bytes);

  // Page p of the list lies at offset + p * page_stride and is page_bytes long.
  static Layout paged(size_t offset, absl::Span<const uint32_t> pages, size_t page_stride,
                      size_t page_bytes);

  // `count` rows of `row_bytes`, `stride` bytes apart: a column slice of a matrix, the heads of
  // one tensor-parallel shard.
  static Layout strided(size_t offset, size_t count, size_t stride, size_t row_bytes);

  // The general form. `dims` outermost first, at most kMaxDims of them.
  static Layout box(size_t offset, absl::Span<const Dim> dims, size_t piece_bytes);

  // This layout again `count` times, `stride` bytes apart: adds an outermost dimension.
  Layout repeated(size_t count, size_t stride) const;

  // This layout with the largest page of its lists looked up now, so that no check() reads them
  // again: for lists that serve many transfers. They must not change afterwards.
  Layout measured() const;

  size_t offset() const { return offset_; }
  size_t piece_bytes() const { return piece_bytes_; }
  absl::Span<const Dim> dims() const { return {dims_.data(), static_cast<size_t>(num_dims_)}; }

  // Bytes described, summed over all pieces. Saturates at SIZE_MAX where the true number overflows.
  size_t bytes() const { return num_dims_ == 0 ? piece_bytes_ : box_bytes(); }

  // Checks that every byte lies inside a region of `region_bytes`, without overflow. `side` names
  // the layout in the message ("local", "remote"). Linear in the page list, 0.1 to 1 ns a page,
  // unless it is measured().
  absl::Status check(size_t region_bytes, const char* side) const {
    const bool one_run = num_dims_ == 0 && !too_deep_;
    if (one_run && piece_bytes_ <= region_bytes && offset_ <= region_bytes - piece_bytes_) {
      return absl::OkStatus();
    }
    return check_box(region_bytes, side);
  }

 private:
  friend class LayoutWalker;
  size_t box_bytes() const;
  size_t reach() const;
  absl::Status check_box(size_t region_bytes, const char* side) const;
  void add_outer(Dim dim);

  size_t offset_ = 0;
  size_t piece_bytes_ = 0;
  size_t measured_ = 0;  // reach(), where it is known
  int num_dims_ = 0;
  bool too_deep_ = false;
  std::array<Dim, kMaxDims> dims_{};
};

// Walks one layout in order, from any byte of it. Never allocates.
class LayoutWalker {
 public:
  // Stands on byte `start` of the layout (0 <= start <= layout.bytes()). The layout and its index
  // lists must outlive the walker.
  LayoutWalker(const Layout& layout, size_t start);

  size_t offset() const { return at_ + in_piece_; }  // region offset of the current byte
  size_t run() const { return layout_->piece_bytes_ - in_piece_; }  // bytes left in this piece
  void advance(size_t bytes);                                       // 0 < bytes <= run()

 private:
  void next_piece();

  const Layout* layout_;
  size_t at_ = 0;        // offset of the current piece
  size_t in_piece_ = 0;  // bytes of it already passed
  std::array<size_t, Layout::kMaxDims> step_{};
};

// One contiguous copy: `bytes` from (or to) local_offset to (or from) remote_offset.
struct Piece {
  size_t local_offset = 0;
  size_t remote_offset = 0;
  size_t bytes = 0;
};

// Walks a local and a remote layout in lockstep over bytes [begin, end) of the transfer and yields
// maximal pieces that are contiguous on both sides. Both layouts describe the same number of bytes.
class TransferCursor {
 public:
  TransferCursor(const Layout& local, const Layout& remote, size_t begin, size_t end);

  // The next piece, at most max_bytes long; false when there is none left.
  bool next(Piece& piece, size_t max_bytes = SIZE_MAX);

  size_t position() const { return position_; }  // bytes of the transfer already yielded
  size_t remaining() const { return end_ - position_; }

 private:
  LayoutWalker local_;
  LayoutWalker remote_;
  size_t position_;
  size_t end_;
};

}  // namespace baton
