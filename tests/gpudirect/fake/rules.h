// The classes of what a real driver punishes by corruption, a crash, a hang or a leak. A
// violation's text ends with the name of its class.
#pragma once

#include <cstdint>

namespace baton::gpudirect {

enum class Rule : uint8_t {
  kContext = 1,  // no context current, another device's, one left current, no cuInit
  kLifetime,     // use after free, freed while in use or exported; what is left at the end
  kRange,        // of exports and questions: whole pages, of one allocation, known flags
  kMapping,      // virtual memory management: granularity, order, each thing given back once
  kSharing,      // between processes: handles, rights, and memory that goes while a peer copies
  kCopy,         // outside allocations, pageable, the legacy stream, overlaps, batches' attributes
  kWord,         // waits for words: unable devices, addresses, flags; waits that nobody ends
  kBlocking,     // calls that block for long on a progress thread
  kModule,       // loads while kernels run, kernels that are not loaded, launches of no kernel
  kEntry,        // entries asked for as of another version
  kStale,        // destroyed streams, events, modules; destroyed while something waits for them
  kCapture,  // while a stream is recorded: waits, questions, events; graphs that are gone or left
  kUsers,    // the application's: recordings that others' calls spoil or that get what is not its
};
inline constexpr int kRules = 13;

constexpr const char* name_of(Rule rule) {
  constexpr const char* kNames[] = {"",        "context", "lifetime", "range",    "mapping",
                                    "sharing", "copying", "word",     "blocking", "module",
                                    "entry",   "stale",   "capture",  "user's"};
  return kNames[static_cast<int>(rule)];
}

}  // namespace baton::gpudirect
