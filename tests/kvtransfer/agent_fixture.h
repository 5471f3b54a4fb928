// Two agents, alpha and beta, over each provider in turn: the fixture of tests with
// TEST_P(AgentTest).
#pragma once

#include "tests/kvtransfer/agent_pair.h"
#include "tests/test.h"
#include "tests/until.h"
#include "tests/usable_provider.h"

namespace baton::kvtransfer {

inline const Time kLong = until_gives_up();

inline std::vector<std::string> every_provider() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : registered_providers()) names.push_back(name);
  return names;
}

class AgentTest : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    a_ = make_agent(agent_options("alpha", GetParam()));
    b_ = make_agent(agent_options("beta", GetParam()));
    mine_.emplace(*a_, 1 << 20, 3);
    theirs_.emplace(*b_, 1 << 20, 100);
    EXPECT_EQ(introduce(*a_, *b_), "beta");
  }
  // Beta's inbox, which must get `count` messages.
  std::vector<AgentMessage> heard(Agent& agent, size_t count) {
    std::vector<AgentMessage> all;
    until([&] {
      for (AgentMessage& message : agent.messages()) all.push_back(std::move(message));
      return all.size() >= count;
    });
    EXPECT_EQ(all.size(), count);
    return all;
  }
  absl::Status run(AgentTransferId id) {
    if (absl::Status status = a_->post(id); !status.ok()) return status;
    return a_->wait(id, kLong);
  }

  std::optional<AgentMemory> mine_, theirs_;  // outlive the agents: what was abandoned may move
  std::unique_ptr<Agent> a_, b_;
};

}  // namespace baton::kvtransfer
