// Incoming bytes of a rail: headers go through a small buffer, payload straight to its destination.
//
// While payload is under way, one recvmsg covers the rest of it and as many bytes behind it as lay
// between the last two payloads: a stream of like frames costs about one system call each and its
// payload is never copied twice.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string_view>

#include "transport/framed/frame.h"
#include "transport/net/seal.h"
#include "transport/tcp/file_buffers.h"

namespace baton::tcp {

class RxStream {
 public:
  static constexpr size_t kBufferBytes = 2 * (framed::kMaxHead + net::kSealBytes);

  static constexpr size_t kNowhereBytes = 256 << 10;

  // `nowhere` takes payload that must not land: kNowhereBytes that no caller reads.
  // Payload that lands is opened by `opener` where that protects payload.
  RxStream(char* nowhere, net::Opener& opener) : nowhere_(nowhere), opener_(opener) {}

  // Needed while anything is buffered or on its way; the rail lends it.
  struct Memory {
    explicit Memory(FileBuffers& from) : buffers(from), buffer(from.take()) {}
    ~Memory() {
      if (buffer.data != nullptr) buffers.give_back(buffer);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    FileBuffers& buffers;
    const FileBuffers::Buffer buffer;      // kBufferBytes, or null
    iovec pieces[framed::kMaxPieces + 1];  // then the buffer
  };
  void lend(Memory* memory) {
    memory_ = memory;
    buffer_ = memory == nullptr ? nullptr : memory->buffer.data;
    iov_ = memory == nullptr ? nullptr : memory->pieces;
  }

  // Bytes that are here and have not been consumed: headers and variable parts.
  std::string_view buffered() const {
    return begin_ == end_ ? std::string_view() : std::string_view(buffer_ + begin_, end_ - begin_);
  }
  char* front() { return buffer_ + begin_; }
  void consume(size_t bytes) {
    begin_ += bytes;
    gap_seen_ += bytes;
  }

  // A frame's payload follows: either to the pieces added now, or to nowhere.
  void start_payload(size_t bytes);
  // The pieces are memory that stays while it is registered: a copy of our own may go there.
  void memory_stays() { stays_ = true; }
  void add_piece(void* data, size_t bytes);
  // From here on the rest of the payload goes nowhere.
  void discard();
  bool discarding() const { return pieces_ == 0; }
  size_t payload_left() const { return payload_left_; }
  // Whether the next bytes land in memory that may be gone.
  bool may_fault() const { return payload_left_ > 0 && !discarding() && !stays_; }
  // Moves buffered bytes that belong to the payload to where they belong. False when that memory
  // is not there any more.
  bool absorb();

  // Sets up the next receive.
  void fill(msghdr& message);
  // False when memory that they lie in has gone since.
  [[nodiscard]] bool received(size_t bytes);

 private:
  static constexpr size_t kBulk = 64 << 10;
  static constexpr size_t kOpened = 16 << 10;  // at a time, so that the caches have it twice
  [[nodiscard]] bool land(size_t bytes);       // advances over pieces that have been filled
  [[nodiscard]] bool open(void* data, size_t bytes);
  size_t copy_out(size_t bytes);

  Memory* memory_ = nullptr;
  char* buffer_ = nullptr;
  char* nowhere_;
  net::Opener& opener_;
  size_t begin_ = 0;
  size_t end_ = 0;
  size_t payload_left_ = 0;
  iovec* iov_ = nullptr;
  size_t piece_ = 0;
  size_t pieces_ = 0;  // 0: discard
  size_t gap_ = framed::kHeaderBytes;
  size_t gap_seen_ = 0;
  bool bulk_ = false;
  bool stays_ = false;
};

}  // namespace baton::tcp
