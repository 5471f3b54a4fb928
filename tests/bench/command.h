// The `baton` command as a process, as a user runs it.
#pragma once

#include <string>
#include <vector>

#include "bench/report/child_process.h"
#include "bench/report/report.h"

namespace baton::bench {

// How long these wait for a line, or for the end.
inline const Time kLimit = patient(std::chrono::seconds(100));

struct Ended {
  int status = -1;     // of the exit; -1: it did not end in time
  std::string output;  // both streams
};

// Starts `baton ARGUMENTS`, which a shell splits into words. Both streams go to its pipe.
ChildProcess start(const std::string& arguments);
// The rest of what it says, and how it ends.
Ended end_of(ChildProcess& child);
// Runs `baton ARGUMENTS` to its end.
Ended baton(const std::string& arguments);
// Runs a script of the shell, in which "$0" is `baton`; of its streams only stdout goes to the
// pipe.
Ended script(const std::string& text);

// Reads until a line holds `text`: that line. Fails the test where none does.
std::string wait_for(ChildProcess& child, const std::string& text);
// Reads until a server says where it listens: "127.0.0.1:4711".
std::string address_of(ChildProcess& server);

// The words of each line of a table: of those that begin with a number.
std::vector<std::vector<std::string>> table_rows(const std::string& output);

// What --json wrote: one object per line; discarded values where a line is no JSON.
std::vector<Json> rows_in(const std::string& path);

}  // namespace baton::bench
