// The target: offers memory and a counter, and checks what arrived when it is asked to.
#include <unistd.h>

#include <cstring>
#include <iostream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/softroce/faults.h"
#include "tests/softroce/rig.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"

namespace baton::softroce {
namespace {

// "R0 R1 ...": piece i must hold round Ri; 0: nothing was written there.
std::string check(const std::byte* data, const std::string& rounds, uint64_t counter) {
  size_t piece = 0;
  for (const auto& text : absl::StrSplit(rounds, ' ')) {
    const uint64_t round = std::stoull(std::string(text));
    if (round != 0 && !piece_holds(data + piece * kPieceBytes, piece, round)) {
      return absl::StrCat("piece ", piece, " is not that of round ", round);
    }
    ++piece;
  }
  return absl::StrCat("counter ", counter);
}

}  // namespace

int run_target(const std::string& board_path, const std::string& host) {
  const Board board(board_path);
  auto worker = Worker::create(worker_options("target", host));
  if (!worker.ok()) return std::cerr << worker.status() << "\n", 1;
  auto pool = MemoryPool::create(**worker, {.slab_bytes = kBytes});
  if (!pool.ok()) return std::cerr << pool.status() << "\n", 1;
  const auto block = (*pool)->allocate(kBytes);
  const auto counter = (*worker)->allocate_counter();
  if (!block.ok() || !counter.ok()) return std::cerr << "no memory\n", 1;
  std::memset(block->data, 0xcc, kBytes);
  const ProgressThread thread(**worker);
  const std::string offer = absl::StrCat(
      (*worker)->address(), "\n",
      absl::BytesToHexString((*worker)->remote_region(block->region)->encode()), "\n",
      block->offset, "\n", absl::BytesToHexString((*worker)->remote_counter(*counter).encode()));
  if (!board.write("pid", std::to_string(getpid())).ok() || !board.write("offer", offer).ok()) {
    return std::cerr << "cannot write to the board\n", 1;
  }
  while (true) {
    Notification question;
    const absl::Status status =
        (*worker)->wait_until([&] { return (*worker)->next_notification(question); });
    if (!status.ok()) return std::cerr << status << "\n", 1;
    const std::string answer =
        check(block->data, question.payload, (*worker)->counter_value(*counter));
    (*worker)->notify_detached(question.peer, answer).IgnoreError();
  }
}

}  // namespace baton::softroce
