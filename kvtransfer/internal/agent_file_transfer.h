// A transfer between an agent's memory and its files: jobs of some MiB each, which the threads of
// agent_files.h do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/internal/agent_files.h"
#include "kvtransfer/internal/agent_list.h"
#include "kvtransfer/internal/agent_transfer.h"

namespace baton::kvtransfer {

// Bytes that lie together in memory and in a file.
struct FilePiece {
  uint64_t offset = 0;
  std::byte* memory = nullptr;
  uint64_t bytes = 0;
  uint32_t region = 0;  // of the plan's files
};

struct AgentFilePlan {
  std::vector<FileRegion> files;     // that it uses
  std::vector<MemoryRegion> memory;  // likewise
  std::vector<FilePiece> pieces;     // by file and offset, so that neighbours go at once
  uint64_t bytes = 0;
};

// As plan_agent_transfer(), of a local list and one of files.
absl::StatusOr<AgentFilePlan> plan_file_transfer(const AgentList& local,
                                                 absl::Span<const int64_t> local_indices,
                                                 const AgentList& files,
                                                 absl::Span<const int64_t> file_indices);
absl::StatusOr<AgentFilePlan> plan_file_transfer(const AgentList& local, const AgentList& files);

// What a message is refused with, and a local side that is not of the host.
absl::Status files_hear_nothing();
absl::Status files_are_of_the_host(MemoryKind kind);

// Where a job begins, and how much of the plan it does.
struct FileJob {
  size_t piece = 0;
  uint64_t skip = 0;  // of that piece
  uint64_t bytes = 0;
};

// All states are under the lock of the agent's files.
class AgentFileTransfer final : public AgentTransfer,
                                public std::enable_shared_from_this<AgentFileTransfer> {
 public:
  AgentFileTransfer(AgentFiles& files, Op op, AgentFilePlan plan, std::string agent,
                    uint64_t epoch);

  // The agent's lock is held: what the transfer uses stays registered until it is among those that
  // run. No message.
  absl::Status post(PeerId peer, const std::string_view* message) override;
  bool needs_peer() const override { return false; }
  void feed() override {}
  void abort() override;
  bool quiet() const override;

 private:
  friend class AgentFiles;
  // Locked, all but run().
  bool uses(const FileRegion& region) const;
  bool uses(const MemoryRegion& region) const;
  bool has_jobs() const { return !stop_ && next_.piece < plan_.pieces.size(); }
  std::optional<FileJob> take_job();
  absl::Status run(FileJob job) const;
  absl::Status move(FileJob& job) const;
  void job_done(const absl::Status& status);
  void stop();
  void end_if_over();

  AgentFiles& files_;
  const Op op_;
  const AgentFilePlan plan_;

  std::atomic<bool> stop_{false};  // also looked at between two system calls
  FileJob next_;                   // what no thread has taken
  size_t jobs_ = 0;                // that threads have
};

}  // namespace baton::kvtransfer
