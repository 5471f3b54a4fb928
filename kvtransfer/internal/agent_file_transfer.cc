// Pieces of a file in their order, and the system calls that move them.
#include "kvtransfer/internal/agent_file_transfer.h"

#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_memory_kind.h"
#include "kvtransfer/internal/agent_plan.h"

namespace baton::kvtransfer {
namespace {

// What a thread does before it looks whether it is still wanted, and whose turn it is.
constexpr uint64_t kJobBytes = 8 << 20;

template <typename Index>
absl::StatusOr<AgentFilePlan> pieces_of(const AgentList& local, const AgentList& files,
                                        size_t pairs, Index&& index) {
  AgentFilePlan out;
  for (const AgentUse& use : files.uses()) out.files.push_back(use.file);
  for (const AgentUse& use : local.uses()) out.memory.push_back(use.local);
  out.pieces.reserve(pairs);
  const absl::Status status = for_each_pair(
      local, files, pairs, index, [&](const AgentList::Place& a, const AgentList::Place& b) {
        out.pieces.push_back({.offset = out.files[b.segment->use].offset + b.offset,
                              .memory = out.memory[a.segment->use].base + a.offset,
                              .bytes = a.segment->bytes,
                              .region = b.segment->use});
        out.bytes += a.segment->bytes;
      });
  if (!status.ok()) return status;
  const auto file_of = [&](const FilePiece& piece) { return out.files[piece.region].file.get(); };
  std::stable_sort(out.pieces.begin(), out.pieces.end(), [&](const auto& a, const auto& b) {
    return std::pair(file_of(a)->number, a.offset) < std::pair(file_of(b)->number, b.offset);
  });
  size_t kept = 0;
  for (size_t i = 0; i < out.pieces.size(); ++i) {
    const FilePiece& piece = out.pieces[i];
    FilePiece* last = kept == 0 ? nullptr : &out.pieces[kept - 1];
    if (last != nullptr && file_of(*last) == file_of(piece) &&
        last->offset + last->bytes == piece.offset && last->memory + last->bytes == piece.memory) {
      last->bytes += piece.bytes;
    } else {
      out.pieces[kept++] = piece;
    }
  }
  out.pieces.resize(kept);
  return out;
}

}  // namespace

absl::StatusOr<AgentFilePlan> plan_file_transfer(const AgentList& local,
                                                 absl::Span<const int64_t> local_indices,
                                                 const AgentList& files,
                                                 absl::Span<const int64_t> file_indices) {
  return plan_pairs<AgentFilePlan>(local_indices, file_indices, [&](size_t pairs, auto&& index) {
    return pieces_of(local, files, pairs, index);
  });
}

absl::StatusOr<AgentFilePlan> plan_file_transfer(const AgentList& local, const AgentList& files) {
  return plan_pairs<AgentFilePlan>(local, files, [&](size_t pairs, auto&& index) {
    return pieces_of(local, files, pairs, index);
  });
}

absl::Status files_hear_nothing() {
  return absl::UnimplementedError(
      "a transfer with a file cannot carry a message: make and post it without one");
}

absl::Status files_are_of_the_host(MemoryKind kind) {
  return absl::UnimplementedError(absl::StrFormat(
      "files (FILE) are read and written from host memory (DRAM), not from %s: move the bytes to "
      "registered host memory first",
      kind_name(kind)));
}

AgentFileTransfer::AgentFileTransfer(AgentFiles& files, Op op, AgentFilePlan plan,
                                     std::string agent, uint64_t epoch)
    : AgentTransfer(std::move(agent), epoch, files.mutex_, files.worker_.clock(),
                    {.bytes = plan.bytes, .descriptors = plan.pieces.size()}),
      files_(files),
      op_(op),
      plan_(std::move(plan)) {}

absl::Status AgentFileTransfer::post(PeerId /*peer*/, const std::string_view* message) {
  if (message != nullptr && !message->empty()) return files_hear_nothing();
  const Time now = files_.worker_.clock().now();
  for (const FileRegion& region : plan_.files) {
    if (!files_.holds(region)) {
      return absl::NotFoundError(absl::StrFormat(
          "a range of file descriptor %u that the transfer uses is no longer registered",
          region.file->number));
    }
    if (op_ == Op::kWrite && (fcntl(region.file->fd.get(), F_GETFL) & O_APPEND) != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("file descriptor %u was opened with O_APPEND, so writes go to the file's "
                          "end whatever the offset; open it without",
                          region.file->number));
    }
  }
  for (const MemoryRegion& region : plan_.memory) {
    if (absl::Status status = files_.worker_.remote_region(region).status(); !status.ok()) {
      return status;
    }
  }
  std::unique_lock lock(files_.mutex_);
  if (absl::Status good = may_post(); !good.ok()) return good;
  if (!plan_.pieces.empty()) {
    if (absl::Status status = files_.start(shared_from_this()); !status.ok()) return status;
  }
  begin(now);
  stop_ = false;
  next_ = {};
  end_if_over();
  telemetry_.post_duration = files_.worker_.clock().now() - now;
  files_.unlock_and_wake(lock);
  return absl::OkStatus();
}

bool AgentFileTransfer::uses(const FileRegion& region) const {
  return std::any_of(plan_.files.begin(), plan_.files.end(),
                     [&](const FileRegion& used) { return used.id == region.id; });
}

bool AgentFileTransfer::uses(const MemoryRegion& region) const {
  return std::any_of(plan_.memory.begin(), plan_.memory.end(), [&](const MemoryRegion& used) {
    return used.index == region.index && used.generation == region.generation;
  });
}

std::optional<FileJob> AgentFileTransfer::take_job() {
  if (!has_jobs()) return std::nullopt;
  FileJob job = next_;
  while (next_.piece < plan_.pieces.size() && job.bytes < kJobBytes) {
    const uint64_t left = plan_.pieces[next_.piece].bytes - next_.skip;
    const uint64_t some = std::min(left, kJobBytes - job.bytes);
    job.bytes += some;
    next_.skip += some;
    if (some == left) {
      ++next_.piece;
      next_.skip = 0;
    }
  }
  ++jobs_;
  return job;
}

absl::Status AgentFileTransfer::run(FileJob job) const {
  while (job.bytes > 0 && !stop_) {
    if (absl::Status status = move(job); !status.ok()) return status;
  }
  return job.bytes == 0 ? absl::OkStatus() : absl::CancelledError("aborted");
}

// One system call: pieces of the job that follow each other in their file.
absl::Status AgentFileTransfer::move(FileJob& job) const {
  std::array<iovec, IOV_MAX> vectors;
  size_t count = 0;
  uint64_t held = 0;
  const FilePiece& first = plan_.pieces[job.piece];
  const OpenFile& file = *plan_.files[first.region].file;
  const uint64_t offset = first.offset + job.skip;
  for (size_t i = job.piece; count < vectors.size() && held < job.bytes; ++i) {
    const FilePiece& piece = plan_.pieces[i];
    const uint64_t skip = count == 0 ? job.skip : 0;
    if (plan_.files[piece.region].file.get() != &file || piece.offset + skip != offset + held) {
      break;
    }
    const uint64_t some = std::min(piece.bytes - skip, job.bytes - held);
    vectors[count++] = {piece.memory + skip, some};
    held += some;
  }
  const auto at = static_cast<off_t>(offset);
  const ssize_t moved = op_ == Op::kWrite
                            ? pwritev(file.fd.get(), vectors.data(), static_cast<int>(count), at)
                            : preadv(file.fd.get(), vectors.data(), static_cast<int>(count), at);
  if (moved < 0) {
    if (errno == EINTR) return absl::OkStatus();
    const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    const bool unaligned = errno == EINVAL && (file.flags & O_DIRECT) != 0;
    return absl::Status(
        full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInternal,
        absl::StrFormat("file descriptor %u at %u: could not be %s: %s%s", file.number, offset,
                        op_ == Op::kWrite ? "written" : "read", strerror(errno),
                        unaligned ? "; it was opened with O_DIRECT: offsets, sizes and addresses "
                                    "must be multiples of its block"
                                  : ""));
  }
  if (moved == 0) {
    return absl::InternalError(
        absl::StrFormat("the file of descriptor %u ends at %u: %u more bytes were requested",
                        file.number, offset, held));
  }
  auto left = static_cast<uint64_t>(moved);
  job.bytes -= left;
  while (left > 0) {
    const uint64_t some = std::min(left, plan_.pieces[job.piece].bytes - job.skip);
    left -= some;
    job.skip += some;
    if (job.skip == plan_.pieces[job.piece].bytes) {
      ++job.piece;
      job.skip = 0;
    }
  }
  return absl::OkStatus();
}

void AgentFileTransfer::job_done(const absl::Status& status) {
  --jobs_;
  if (!status.ok()) {
    if (why_.ok()) why_ = status;
    stop_ = true;
  }
  end_if_over();
}

void AgentFileTransfer::stop() {
  if (state_ != AgentTransferState::kRunning) return;
  // Where threads have all that is left of it, they say whether they stopped before its end.
  if (has_jobs()) why_ = absl::CancelledError("aborted");
  stop_ = true;
  end_if_over();
}

void AgentFileTransfer::end_if_over() {
  if (jobs_ > 0 || has_jobs()) return;
  end();
  std::erase_if(files_.running_, [&](const auto& other) { return other.get() == this; });
  files_.ended_ = true;
}

void AgentFileTransfer::abort() {
  std::unique_lock lock(files_.mutex_);
  stop();
  files_.unlock_and_wake(lock);
}

bool AgentFileTransfer::quiet() const {
  const std::lock_guard lock(files_.mutex_);
  return state_ != AgentTransferState::kRunning;
}

}  // namespace baton::kvtransfer
