// What the README's example needs of React Native, whose package is not installed for a type.
declare module "react-native" {
  export const Platform: { readonly OS: string };
}
