// Chat templates: found where checkpoints have them, rendered, and their errors.
#include "engine/tokenizer/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "engine/files/files.h"
#include "tests/temporary_folder.h"

namespace baton::engine::serve {
namespace {

using ::testing::HasSubstr;

constexpr char kChatMl[] =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

nlohmann::ordered_json chat(const std::string& content) {
  return {{{"role", "system"}, {"content", "Be brief."}}, {{"role", "user"}, {"content", content}}};
}

TEST(ChatTemplate, RendersMessages) {
  auto made = ChatTemplate::parse(kChatMl, "", "");
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(*made->render(chat(" Hi {{ x }} ")),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ x }}<|im_end|>\n"
            "<|im_start|>assistant\n");
}

TEST(ChatTemplate, KnowsTokensAndTrimsBlocksAsTransformersDoes) {
  auto made = ChatTemplate::parse(
      "{{ bos_token }}\n  {%- for m in messages %}\n[{{ m.role | upper }}]{{ m.content }}"
      "{% if loop.last %}{{ eos_token }}{% endif %}\n  {% endfor %}",
      "<s>", "</s>");
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(*made->render(chat("Hi")), "<s>[SYSTEM]Be brief.[USER]Hi</s>");
}

TEST(ChatTemplate, SaysWhatTheTemplateSays) {
  auto made = ChatTemplate::parse(
      "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}"
      "{% endif %}",
      "", "");
  ASSERT_TRUE(made.ok()) << made.status();
  const absl::Status status = made->render(chat("Hi")).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no system role here"));
  for (const char* wrong : {"{% for x in %}", "{{ 'a", "{% if true %}", "{% endfor %}"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ChatTemplate::parse(wrong, "", "").status())) << wrong;
  }
}

class ChatTemplateFiles : public ::testing::Test {
 protected:
  void write(const char* name, const std::string& text) {
    ASSERT_TRUE(write_file_atomically(folder_.path(name), text).ok());
  }
  std::string rendered() {
    auto loaded = load_chat_template(folder_.path("."));
    if (!loaded.ok()) return std::string(loaded.status().message());
    return loaded->has_value() ? *(*loaded)->render(chat("Hi")) : "none";
  }
  const TemporaryFolder folder_;
};

TEST_F(ChatTemplateFiles, AreFoundInEachPlace) {
  EXPECT_EQ(rendered(), "none");
  write("tokenizer_config.json", R"({"bos_token": {"content": "<b>"}, "eos_token": null})");
  EXPECT_EQ(rendered(), "none");
  write("tokenizer_config.json", R"({"bos_token": {"content": "<b>"},
                                     "chat_template": "{{ bos_token }}1"})");
  EXPECT_EQ(rendered(), "<b>1");
  write("tokenizer_config.json",
        R"({"eos_token": "<e>", "chat_template": [{"name": "tool_use", "template": "no"},
                                 {"name": "default", "template": "{{ eos_token }}2"}]})");
  EXPECT_EQ(rendered(), "<e>2");
  write("chat_template.jinja", "{{ eos_token }}3");
  EXPECT_EQ(rendered(), "<e>3");
}

TEST_F(ChatTemplateFiles, AreRefusedByName) {
  write("tokenizer_config.json", R"({"chat_template": 7})");
  EXPECT_THAT(rendered(), HasSubstr("chat_template"));
  write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": ""}]})");
  EXPECT_THAT(rendered(), HasSubstr("default"));
  write("tokenizer_config.json", R"({"chat_template": "{% for %}"})");
  EXPECT_THAT(rendered(), HasSubstr("template is wrong"));
}

}  // namespace
}  // namespace baton::engine::serve
