// A fixture with a server of the perftest-shaped commands, at a port of its own.
#pragma once

#include "tests/bench/command.h"
#include "tests/test.h"

namespace baton::bench {

class PerfServer : public testing::Test {
 protected:
  PerfServer()
      : server_(start("write_bw --listen 127.0.0.1 -p 0 --keep")), where_(address_of(server_)) {}

  Ended client(const std::string& arguments) { return baton(arguments + " " + where_); }
  void expect_alive() {
    const Ended ended = client("write_bw --provider tcp -n 20 -s 100");
    EXPECT_EQ(ended.status, 0) << ended.output;
  }

  ChildProcess server_;
  std::string where_;  // host:port
};

}  // namespace baton::bench
