// Templates as Jinja2 renders them, and what is refused by name.
#include <nlohmann/json.hpp>

#include "engine/files/files.h"
#include "engine/tokenizer/chat_template.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

Json corpus() {
  const auto text = read_file(BATON_JINJA_CORPUS, size_t{16} << 20);
  return text.ok() ? Json::parse(*text, nullptr, false) : Json::array();
}

std::string error_of(const std::string& source) {
  const auto made = ChatTemplate::parse(source);
  if (!made.ok()) return "when it is read: " + std::string(made.status().message());
  const auto text = made->render(Json::array());
  return text.ok() ? "no error, but: " + *text : std::string(text.status().message());
}

TEST(Jinja, SaysWhatJinja2SaysOfEveryShape) {
  const Json all = corpus();
  ASSERT_GT(all.size(), 200u);
  const Json &chats = all[0]["chats"], &tokens = all[0]["tokens"];
  ASSERT_EQ(chats.size(), 5u);
  for (size_t i = 1; i < all.size(); ++i) {
    const Json& shape = all[i];
    SCOPED_TRACE(shape["name"].get<std::string>() + ": " + shape["source"].get<std::string>());
    const auto made = ChatTemplate::parse(shape["source"], tokens);
    ASSERT_TRUE(made.ok()) << made.status();
    for (size_t c = 0; c < chats.size(); ++c) {
      const Json& expected = shape["answers"][shape["answers"].size() == 1 ? 0 : c];
      const auto text = made->render(chats[c]);
      if (expected.contains("text")) {
        ASSERT_TRUE(text.ok()) << text.status();
        EXPECT_EQ(*text, expected["text"].get<std::string>());
      } else {
        ASSERT_FALSE(text.ok()) << *text;
        if (expected.contains("raised")) {
          EXPECT_THAT(std::string(text.status().message()),
                      HasSubstr(expected["raised"].get<std::string>()));
        }
      }
    }
  }
}

// Each with the line, before any chat comes.
TEST(Jinja, RefusesWhatItDoesNotKnowByName) {
  for (const auto& [source, name] : std::initializer_list<std::pair<const char*, const char*>>{
           {"{% include 'x' %}", "include"},
           {"{% extends 'x' %}", "extends"},
           {"{% import 'x' as y %}", "import"},
           {"{% from 'x' import y %}", "from"},
           {"{% block x %}{% endblock %}", "block"},
           {"{% autoescape true %}{% endautoescape %}", "autoescape"},
           {"{% do x %}", "'do'"},
           {"{% nosuch %}", "unknown tag 'nosuch'"},
           {"{{ x | random }}", "filter 'random'"},
           {"{{ x | urlize }}", "filter 'urlize'"},
           {"{{ x | from_json }}", "'from_json'"},
           {"{{ x | map('wordwrap') }}", "filter 'wordwrap'"},
           {"{{ x is nosuch }}", "test named 'nosuch'"},
           {"{{ x | select('nosuch') }}", "'nosuch'"},
           {"{{ 'x'.encode() }}", "method 'encode'"},
           {"{{ self.x() }}", "'self'"},
           {"{{ 99999999999999999999 }}", "64 bits"},
           {"{{ '\\ud800' }}", "surrogate"},
           {"{% break %}", "outside loop"},
           {"\n\n{{ 'a }}", "line 3"}}) {
    EXPECT_THAT(error_of(source), AllOf(HasSubstr("when it is read"), HasSubstr(name))) << source;
  }
}

// Where Python's text would be chance, or a number has no end.
TEST(Jinja, RefusesWhatItCannotSayWhenItIsAsked) {
  for (const auto& [source, why] : std::initializer_list<std::pair<const char*, const char*>>{
           {"{{ [1] | map('string') }}", "address"},
           {"{{ range }}", "address"},
           {"{{ 'x'.upper }}", "address"},
           {"{{ 2 ** 64 }}", "64 bits"},
           {"{{ 'a' is sameas 'a' }}", "chance"},
           {"{{ ('x' | safe).split('x') }}", "not supported"},
           {"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"},
           {"{{ 'a' * 1000000000 }}", "too long"},
           {"{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
            "too long"}}) {
    EXPECT_THAT(error_of(source), HasSubstr(why)) << source;
  }
}

TEST(Jinja, TemplatesThatAreNestedWithoutEndAreRefused) {
  const auto times = [](const char* text) {
    std::string out;
    for (int i = 0; i < 5000; ++i) out += text;
    return out;
  };
  for (const std::string& source :
       {"{{ " + times("(") + "1" + times(")") + " }}", "{{ " + times("[") + times("]") + " }}",
        "{{ " + times("{1:") + "1" + times("}") + " }}", "{{ " + times("-") + "1 }}",
        "{{ " + times("not ") + "1 }}", "{{ x" + times(".a") + " }}",
        "{{ x" + times(" | trim") + " }}", "{{ 1" + times(" + 1") + " }}",
        times("{% if x %}") + times("{% endif %}"),
        "{% if x %}" + times("{% elif x %}") + "{% endif %}"}) {
    EXPECT_THAT(error_of(source), HasSubstr("nested too deeply")) << source.substr(0, 40);
  }
}

}  // namespace
}  // namespace baton::engine
