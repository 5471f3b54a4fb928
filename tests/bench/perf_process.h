// The perftest-shaped commands as processes: one that runs and is waited for, and a server.
#pragma once

#include <charconv>
#include <string>

#include "bench/child_process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace baton::bench {

inline constexpr Time kLimit = std::chrono::seconds(100);
inline ChildProcess start(const std::string& arguments) {
  auto child = ChildProcess::spawn(
      -1, {"sh", "-c", std::string("exec '") + BATON_COMMAND + "' " + arguments + " 2>&1"}, {});
  EXPECT_TRUE(child.ok()) << child.status();
  return *std::move(child);
}

struct Ended {
  int status = -1;
  std::string output;  // both streams
};

inline Ended end_of(ChildProcess& child) {
  Ended ended;
  while (true) {
    const auto line = child.read_line(kLimit);
    if (!line.ok()) break;
    ended.output += *line + "\n";
  }
  if (const auto status = child.wait(kLimit); status.ok()) ended.status = *status;
  return ended;
}

inline Ended baton(const std::string& arguments) {
  ChildProcess child = start(arguments);
  return end_of(child);
}

// Reads until a line holds `text`; that line.
inline std::string wait_for(ChildProcess& child, const std::string& text) {
  while (true) {
    const auto line = child.read_line(kLimit);
    EXPECT_TRUE(line.ok()) << "waiting for \"" << text << "\": " << line.status();
    if (!line.ok() || line->find(text) != std::string::npos) return line.ok() ? *line : "";
  }
}

// A server of its own port.
class PerfServer : public testing::Test {
 protected:
  PerfServer() : server_(start("write_bw --listen 127.0.0.1 -p 0")) {
    const std::string line = wait_for(server_, "listening on ");
    const size_t colon = line.find("127.0.0.1:");
    where_ = colon == std::string::npos ? "" : line.substr(colon, line.find(' ', colon) - colon);
    std::from_chars(where_.data() + 10, where_.data() + where_.size(), port_);
  }

  Ended client(const std::string& arguments) { return baton(arguments + " " + where_); }
  void expect_alive() {
    const Ended ended = client("write_bw --provider tcp -n 20 -s 100");
    EXPECT_EQ(ended.status, 0) << ended.output;
  }

  ChildProcess server_;
  std::string where_;
  uint16_t port_ = 0;
};

}  // namespace baton::bench
