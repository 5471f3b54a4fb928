// The fault cases across two machines: what is injected, and what must come of it.
#pragma once

#include <string>
#include <vector>

#include "transport/worker.h"

namespace baton::softroce {

// What must become of the transfers that are under way.
enum class Outcome {
  kAllDone,  // every one is done, every byte is there once
  kLost,     // the peer is gone: those that are open fail as Unavailable
  kInTime,   // done, or past their own deadline
};

struct Case {
  const char* name;
  const char* injected;    // for people
  const char* here = "";   // shell, on the sender's machine, a third into the transfer
  const char* there = "";  // on the target's; "poweroff" takes its power away
  const char* undo_here = "";
  const char* undo_there = "";
  bool before = false;  // inject before the transfer starts
  Outcome outcome = Outcome::kAllDone;
  // When it must have been noticed; negative: there is nothing to be noticed.
  Time predicted = Time(-1);
  Time outage =
      Time(-1);  // not negative: undone so long after the injection, in the middle of the transfer
  bool loses_rail = false;      // a rail is given up, and comes back after the undoing
  bool restart = false;         // start the target anew afterwards, and meet it
  bool same_peer_after = true;  // afterwards the same peer carries traffic over both rails
  size_t pieces = 120;          // of kPieceBytes
};

const std::vector<Case>& cases();

inline constexpr size_t kPieceBytes = 256 << 10;
inline constexpr size_t kPieces = 16;  // of memory
inline constexpr size_t kBytes = kPieces * kPieceBytes;

// The queue pairs' timeout and retries of both sides: 4.096 us * 2^14 * (6 + 1).
inline constexpr Time kRetriesExceeded = std::chrono::nanoseconds(4096LL * (1 << 14) * 7);
// `verbs.stall_ms`: packets for a machine that is gone wait for its address in the kernel, and rxe
// does not count those as tries.
inline constexpr Time kWatchdog = std::chrono::seconds(2);
// `peer.redial_ms` of both sides: how long a peer that cannot be reached is waited for.
inline constexpr Time kRedial = std::chrono::seconds(5);
inline constexpr Time kPieceDeadline = std::chrono::seconds(1);  // where Outcome::kInTime

WorkerOptions worker_options(const std::string& name, const std::string& host);

// Bytes that depend on piece, round and place.
void fill_piece(std::byte* data, uint64_t piece, uint64_t round);
bool piece_holds(const std::byte* data, uint64_t piece, uint64_t round);

// The two programs; exit statuses.
int run_target(const std::string& board, const std::string& host);
int run_sender(const std::string& board, const std::string& host, const Case& which);

}  // namespace baton::softroce
