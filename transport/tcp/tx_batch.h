// Outgoing bytes of a rail: frames gathered for one sendmsg. Headers lie in an arena, payload is
// sent from where it is.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "transport/framed/frame.h"
#include "transport/net/seal.h"

namespace baton::tcp {

class TxBatch {
 public:
  static constexpr size_t kArenaBytes = 2 * (framed::kMaxHead + net::kSealBytes);
  // Payload that is copied behind its header: a vector more costs the kernel as much.
  static constexpr size_t kInlined = 256;
  static constexpr size_t kVectors = 1024;  // what the kernel takes at once (UIO_MAXIOV)

  // Needed from the first frame of a batch until it is sent; the rail lends it.
  struct Memory {
    char arena[kArenaBytes];
    iovec vectors[kVectors];
  };
  void lend(Memory* memory) {
    arena_ = memory == nullptr ? nullptr : memory->arena;
    iov_ = memory == nullptr ? nullptr : memory->vectors;
  }

  void clear() {
    used_ = vectors_ = next_ = payload_ = 0;
    copies_.clear();
  }
  bool sent() const { return next_ == vectors_; }

  // Room for any one frame, with `trailer` more bytes of headers behind it?
  bool fits_frame(size_t trailer = 0) const {
    return kArenaBytes - used_ >= framed::kMaxHead + net::kSealBytes + trailer &&
           kVectors - vectors_ >= framed::kMaxPieces + 2;
  }
  size_t arena_left() const { return kArenaBytes - used_; }
  size_t vectors() const { return vectors_; }
  size_t payload() const { return payload_; }

  // Where the next header goes; commit_header() puts it in front of what is added from then on.
  char* next_header() { return arena_ + used_; }
  size_t open_header() { return vectors_++; }
  void commit_header(size_t vector, size_t bytes) {
    iov_[vector] = {arena_ + used_, bytes};
    used_ += bytes;
  }
  void add_header(size_t bytes) { commit_header(open_header(), bytes); }
  // Likewise, with a copy of the frame's payload behind the header, so that both leave as one run
  // of bytes with the headers before them. False: the payload is large, or in pieces.
  bool commit_inlined(size_t header, size_t bytes) {
    if (vectors_ != header + 2) return false;
    const iovec& payload = iov_[header + 1];
    if (payload.iov_len > std::min(kInlined, arena_left() - bytes)) return false;
    std::memcpy(arena_ + used_ + bytes, payload.iov_base, payload.iov_len);
    commit_header(header, bytes + payload.iov_len);
    --vectors_;
    if (header == next_) return true;
    iovec& before = iov_[header - 1];
    if (static_cast<char*>(before.iov_base) + before.iov_len != iov_[header].iov_base) return true;
    before.iov_len += iov_[header].iov_len;
    --vectors_;
    return true;
  }

  // Joins what lies next to each other. `first` is the frame's header vector.
  void add_payload(std::byte* data, size_t bytes, size_t header) {
    payload_ += bytes;
    if (vectors_ > header + 1) {
      iovec& last = iov_[vectors_ - 1];
      if (static_cast<std::byte*>(last.iov_base) + last.iov_len == data) {
        last.iov_len += bytes;
        return;
      }
    }
    iov_[vectors_++] = {data, bytes};
  }

  // What has been added since is forgotten.
  struct Mark {
    size_t used, vectors, payload;
  };
  Mark mark() const { return {used_, vectors_, payload_}; }
  void rewind(const Mark& to) {
    used_ = to.used;
    vectors_ = to.vectors;
    payload_ = to.payload;
  }

  // `payload` bytes of a frame, and their tag behind them.
  void add_sealed(char* data, size_t payload) {
    payload_ += payload;
    iov_[vectors_++] = {data, payload + net::kSealTag};
  }

  void fill(msghdr& message) {
    message = {};
    message.msg_iov = iov_ + next_;
    message.msg_iovlen = vectors_ - next_;
  }
  void advance(size_t bytes) {
    while (bytes > 0) {
      iovec& at = iov_[next_];
      const size_t step = std::min(bytes, at.iov_len);
      at.iov_base = static_cast<char*>(at.iov_base) + step;
      at.iov_len -= step;
      bytes -= step;
      if (at.iov_len == 0) ++next_;
    }
  }
  size_t next() const { return next_; }
  const iovec& vector(size_t at) const { return iov_[at]; }
  // Whether payload vectors before `end` still have bytes to send.
  bool unsent_before(size_t end) const { return next_ < end; }
  // Sends a copy of what vectors [begin, end) still hold. False: their memory is gone.
  bool copy_rest(size_t begin, size_t end);
  // Sends zeros instead of what vectors [begin, end) still hold.
  void blank(size_t begin, size_t end);

 private:
  char* arena_ = nullptr;
  iovec* iov_ = nullptr;
  size_t used_ = 0;
  size_t vectors_ = 0;
  size_t next_ = 0;
  size_t payload_ = 0;
  std::vector<std::unique_ptr<char[]>> copies_;  // what copy_rest() made
};

}  // namespace baton::tcp
